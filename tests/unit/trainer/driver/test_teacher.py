"""A teacher whose tokens are not the policy's is refused before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import LlamaConfig

from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.compose import load_config
from trainer.driver import models
from trainer.driver.preflight import check_inputs
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def teacher_directory(path: Path, *, vocab_size: int = 128, tokenizer: Any = None) -> Path:
    LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    ).save_pretrained(path)
    (path / "pytorch_model.bin").touch()
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def compared(cfg: RunConfig, tokenizer: Any) -> list[Any]:
    return list(models.teacher_problems(cfg, models.read_models(cfg), tokenizer))


def taught(path: object) -> RunConfig:
    return load_config(["device=cpu", "algorithm=opd", f"algorithm.kl.reference_model={path}"])


def refused(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_inputs(taught(path))
    (problem,) = caught.value.problems
    assert problem.key == "algorithm.kl.reference_model"
    return str(problem)


@pytest.mark.parametrize("vocab_size", [128, 160])
def test_padding_and_tokens_that_one_alone_names_do_not_matter(tmp_path: Path, vocab_size: int) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>"])
    path = teacher_directory(tmp_path / "teacher", vocab_size=vocab_size, tokenizer=tokenizer)
    assert compared(taught(path), build_tokenizer()) == []
    assert compared(taught("builtin:tiny"), tokenizer) == []


def test_fewer_rows_are_refused(tmp_path: Path) -> None:
    path = teacher_directory(tmp_path / "teacher", vocab_size=127, tokenizer=build_tokenizer())
    assert "has 127 tokens, the policy 128" in refused(path)


def test_other_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        names = {token: index for index, token in enumerate(build_tokenizer().get_vocab())}
        names["0"], names["1"] = names["1"], names["0"]
        patch.setattr("trainer.builtin.tiny_model.VOCABULARY", names)
        path = teacher_directory(tmp_path / "teacher", tokenizer=build_tokenizer())
    text = refused(path)
    assert "the policy's tokenizer as" in text and "tokens differ)" in text


def test_what_cannot_be_compared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = teacher_directory(tmp_path / "teacher")
    (told,) = check_inputs(taught(path)).left_out
    assert f"algorithm.kl.reference_model={path} has no tokenizer" in told
    monkeypatch.setattr(models, "load_tokenizer", lambda *_, **__: pytest.fail("the hub is waited for once"))
    (told,) = compared(taught("some/teacher"), build_tokenizer())
    assert "algorithm.kl.reference_model=some/teacher cannot be read here" in told


def test_without_a_teacher_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_tokenizer", lambda *_, **__: pytest.fail("there is no teacher"))
    assert compared(load_config(["device=cpu", "algorithm.kl.coef=0.1"]), build_tokenizer()) == []
