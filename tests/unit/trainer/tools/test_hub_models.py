"""A model of the hub has to fit its engines too, and is looked at before any of them starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import Qwen2Config

from trainer.__main__ import main
from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.compose import load_config
from trainer.driver.preflight import preflight
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

NAME = "tandem-tests/seven"
SHORT = ("task.max_prompt_tokens=200", "rollout.max_response_tokens=56")
"""The whole context of the model."""


@pytest.fixture(autouse=True)
def cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """28 heads and 4 of keys and values, as Qwen2.5-7B has; its weights are not in the cache yet."""
    hub = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    Qwen2Config(
        vocab_size=128,
        hidden_size=28 * 4,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=256,
    ).save_pretrained(hub / "snapshots" / "abc")
    build_tokenizer().save_pretrained(hub / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rollout.tensor_parallel_size=8",), f"must divide the 28 attention heads of {NAME}"),
        (("rollout.tensor_parallel_size=7",), f"must divide the 4 key-value heads of {NAME}, or be a multiple"),
        (
            ("rollout.max_response_tokens=57",),
            f"prompt and answer need 257 tokens, but the context of {NAME} has 256",
        ),
        (("rollout.max_model_len=300",), "need 300 tokens"),
    ],
)
def test_what_engines_would_refuse_of_a_model_of_the_hub_is_refused_before_they_start(
    overrides: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (f"model.path={NAME}", "device=cpu", *SHORT, *overrides)
    assert main(["--dry-run", *keys]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in " ".join(err.split())
    with pytest.raises(ConfigurationError) as caught:
        preflight(load_config(keys))
    assert words in " ".join(str(caught.value).split())


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4, 14 * 2])
def test_a_model_of_the_hub_that_fits_is_planned(tensor_parallel_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    keys = (f"model.path={NAME}", *SHORT, f"rollout.tensor_parallel_size={tensor_parallel_size}")
    assert main(["--dry-run", "--device-memory-gib", "80", *keys]) == 0, capsys.readouterr().err
    assert f"1 x {tensor_parallel_size} = {tensor_parallel_size} devices" in capsys.readouterr().out


def test_a_hub_that_cannot_be_reached_from_here_is_the_learners_to_tell() -> None:
    tokenizer = f"model.tokenizer_path={NAME}"
    preflight(load_config([f"model.path={NAME}", tokenizer, "device=cpu", *SHORT]))
    preflight(load_config(["model.path=tandem-tests/not-cached", tokenizer, "device=cpu", *SHORT]))


def test_heads_of_the_built_in_model_are_known_before_it_is_made() -> None:
    with pytest.raises(ConfigurationError, match="must divide the 2 attention heads of builtin:tiny"):
        preflight(load_config(["device=cpu", "rollout.tensor_parallel_size=4"]))


def test_a_model_of_the_hub_that_the_learner_cannot_train_is_refused_before_it_starts(tmp_path: Path) -> None:
    hub = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    (hub / "snapshots" / "abc" / "config.json").write_text('{"model_type": "vit", "hidden_size": 32}')
    with pytest.raises(ConfigurationError, match=r"model\.path = tandem-tests/seven"):
        preflight(load_config([f"model.path={NAME}", "device=cpu", *SHORT]))
