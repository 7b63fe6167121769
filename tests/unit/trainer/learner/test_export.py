from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.learner import make_learner, pack, run_config, save_tiny, sequences, weights
from tests.fakes.own_tokenizer import CODE_FILE, VOCABULARY_FILE, save_own_tokenizer

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_exported_model_loads_with_equal_weights_and_logits(kind: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", kind)
    (source / "tokenizer_config.json").write_text('{"x": 1}')
    learner = make_learner(run_config(source))
    batch = pack(sequences(3))
    learner.train_step([batch], step=0)
    out = tmp_path / "export"
    learner.export_hf(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    loaded, trained = dict(model.named_parameters()), weights(learner)
    assert loaded.keys() == trained.keys()
    assert all(tensor.equal(loaded[name]) for name, tensor in trained.items())
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert (out / "tokenizer_config.json").read_text() == '{"x": 1}'
    assert not torch.equal(
        loaded["model.norm.weight"],
        dict(AutoModelForCausalLM.from_pretrained(source).named_parameters())["model.norm.weight"],
    )
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("export")] == ["export"]
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "who may read the config may read the weights"


def test_files_beside_the_weights_come_from_where_the_model_and_its_tokenizer_are(tmp_path: Path) -> None:
    source, tokenizer = save_tiny(tmp_path / "source"), tmp_path / "tokenizer"
    tokenizer.mkdir()
    # End tokens beyond that of config.json, without which an engine would not stop.
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    for directory in (source, tokenizer):
        (directory / "tokenizer.json").write_text(f'"{directory.name}"')
    cfg = run_config(source)
    make_learner(replace(cfg, model=replace(cfg.model, tokenizer_path=str(tokenizer)))).export_hf(tmp_path / "export")
    assert (tmp_path / "export" / "tokenizer.json").read_text() == '"tokenizer"'
    assert (tmp_path / "export" / "generation_config.json").read_text() == '{"eos_token_id": [2, 7]}'


def test_a_tokenizer_with_code_and_files_of_its_own_opens_from_the_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, own = save_tiny(tmp_path / "source"), save_own_tokenizer(tmp_path / "own")
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    for name in ("optimizer.pt", "config.json", "adapter_config.json", "model.safetensors.index.json", ".hidden.json"):
        (own / name).write_text("{}")
    cfg, out = run_config(source), tmp_path / "export"
    cfg = replace(cfg, model=replace(cfg.model, tokenizer_path=str(own), trust_remote_code=True))
    make_learner(cfg).export_hf(out)
    assert caplog.text == ""
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert tokenizer.decode(tokenizer.encode("12 + 7")) == "12 + 7"
    assert tokenizer.get_chat_template("tool_use") == "tools"
    assert json.loads((out / "config.json").read_text())["architectures"]
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json", CODE_FILE,
        VOCABULARY_FILE, "additional_chat_templates",
    }  # fmt: skip


def test_a_tokenizer_that_does_not_open_is_told_and_costs_no_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = save_own_tokenizer(save_tiny(tmp_path / "source"))
    (source / VOCABULARY_FILE).rename(source / "letters.bin")
    cfg = run_config(source)
    make_learner(replace(cfg, model=replace(cfg.model, trust_remote_code=True))).export_hf(tmp_path / "export")
    assert "the tokenizer of the exported model does not open" in caplog.text
    assert f"copy what it misses from {source}" in caplog.text
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_a_tokenizer_that_cannot_be_had_is_told_and_costs_no_weights(
    tmp_path: Path, tiny_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cfg = run_config(tiny_dir)
    cfg = replace(cfg, model=replace(cfg.model, tokenizer_path="tandem-tests/no-such-tokenizer"))
    make_learner(cfg).export_hf(tmp_path / "export")
    assert "model.tokenizer_path 'tandem-tests/no-such-tokenizer' cannot be had" in caplog.text
    assert "the exported model has none" in caplog.text
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_export_is_in_the_dtype_the_engines_served(tmp_path: Path, tiny_dir: Path) -> None:
    cfg = run_config(tiny_dir)
    learner = make_learner(replace(cfg, model=replace(cfg.model, rollout_dtype="bfloat16")))
    for _ in range(2):  # a second export replaces the first
        learner.export_hf(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.dtype == torch.bfloat16
    trained = weights(learner)
    assert all(trained[name].bfloat16().equal(param) for name, param in model.named_parameters())


def test_a_kill_while_one_export_replaces_another_leaves_the_older_one_whole(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, out = make_learner(run_config(tiny_dir)), tmp_path / "export"
    learner.export_hf(out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target == out:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        learner.export_hf(out)
    assert {path.name: path.read_bytes() for path in (tmp_path / "export.replaced").iterdir()} == before
    learner.export_hf(out)
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("export")} == {"export"}
