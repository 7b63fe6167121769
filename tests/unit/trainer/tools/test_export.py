"""What `python -m trainer.export` refuses, and where it finds what it needs; one rank stands for all."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from tests.fakes.learner import TINY, drawn_config, make_learner, process_group, run_config, save_tiny, weights
from trainer.config.plain import dump_yaml
from trainer.config.schema import LoraConfig
from trainer.driver.checkpointing import origin
from trainer.learner.checkpoint import begin, commit
from trainer.tools.export import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import RunConfig


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(tmp_path_factory.mktemp("group") / "store"):
        yield


def save(cfg: RunConfig, run_dir: Path, *steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """Checkpoints of a learner whose weights say the step; returns the weights by step."""
    learner, saved = make_learner(cfg), {}
    for step in steps:
        with torch.no_grad():
            for param in learner.model.parameters():
                param.fill_(step)
        tmp = begin(run_dir / "checkpoints", step)
        learner.save(tmp, step=step)
        commit(tmp, {"origin": origin(cfg)})
        saved[step] = weights(learner)
    (run_dir / "config.yaml").write_text(dump_yaml(cfg))
    return saved


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a run directory that has two checkpoints; not to be changed."""
    path = tmp_path_factory.mktemp("finished")
    save(run_config(save_tiny(path / "model")), path / "run", 5, 20)
    return path


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy to be damaged. The model stays where it was."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def exported_step(out: Path) -> float:
    return float(load_file(out / "model.safetensors")["model.norm.weight"][0])


def refusal(capsys: pytest.CaptureFixture[str], *args: Path | str) -> str:
    """What the command says when it refuses."""
    assert main([str(arg) for arg in args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.removeprefix("refused: ")


@pytest.mark.parametrize(
    ("given", "step"), [("run", 20), ("run/checkpoints", 20), ("run/checkpoints/step_5", 5), ("link", 5)]
)
def test_a_checkpoint_is_found_by_any_name(
    folder: Path, given: str, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "link").symlink_to(folder / "run" / "checkpoints" / "step_5")
    assert main([str(folder / given), str(folder / "out")]) == 0
    assert exported_step(folder / "out") == step
    out, err = capsys.readouterr()
    assert out.startswith(f"wrote {folder / 'out'} from ") and "%|" not in err, "no progress bar"
    aside = folder / "run" / "checkpoints" / "abandoned" / "step_20"
    aside.parent.mkdir()
    (folder / "run" / "checkpoints" / "step_20").rename(aside)
    assert main([str(aside), str(folder / "aside")]) == 0, "one that was set aside"
    assert exported_step(folder / "aside") == 20


def test_an_empty_directory_is_filled_and_any_other_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    out.mkdir()
    assert main([str(folder / "run"), str(out)]) == 0
    before = sorted(out.iterdir())
    capsys.readouterr()
    assert "out is not empty; give a directory that" in refusal(capsys, folder / "run", out)
    assert sorted(out.iterdir()) == before
    assert "config.json is a file" in refusal(capsys, folder / "run", out / "config.json")
    (folder / "next.tmp").mkdir()
    assert "next.tmp exists, where next is written first" in refusal(capsys, folder / "run", folder / "next")
    assert (folder / "next.tmp").is_dir()


def test_model_and_tokenizer_are_found_from_anywhere_and_named_if_they_were_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their paths are relative to where the run was started."""
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"of": "the run"}')
    save_tiny(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    cfg = run_config(Path("model"))
    save(replace(cfg, model=replace(cfg.model, tokenizer_path="words")), tmp_path / "run", 5)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["../run", "out"]) == 0, capsys.readouterr().err
    out = tmp_path / "elsewhere" / "out"
    assert exported_step(out) == 5
    assert (out / "tokenizer_config.json").read_text() == '{"of": "the run"}'
    (tmp_path / "model").rename(tmp_path / "moved")
    capsys.readouterr()
    said = refusal(capsys, "../run", "again")
    assert "is not a directory" in said and "--model" in said
    assert main(["../run", "again", "--model", "../moved"]) == 0


def test_adapters_over_a_model_from_the_seed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seed gives other numbers on the device that the run had."""
    model = save_tiny(tmp_path / "model")
    for weights_file in model.glob("*.safetensors"):
        weights_file.unlink()
    cfg = run_config(model)
    save(replace(cfg, model=replace(cfg.model, random_weights=True, lora=LoraConfig(rank=4))), tmp_path / "run", 5)
    assert "has no weights: below its adapters the run had a model" in refusal(
        capsys, tmp_path / "run", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_a_run_whose_first_weights_were_drawn_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "model")
    (model / "model.safetensors").unlink()
    cfg = drawn_config(model)
    save(cfg, tmp_path / "run", 5)
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert exported_step(tmp_path / "out") == 5
    assert make_learner(cfg).load(tmp_path / "run" / "checkpoints" / "step_5") == 5
    make_learner(run_config(tmp_path / "out"))  # has weights of its own


def test_what_is_no_checkpoint_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, checkpoints = folder / "out", folder / "run" / "checkpoints"
    assert "step_6 is not a directory; give RUN_DIR" in refusal(capsys, checkpoints / "step_6", out)
    assert "holds no checkpoint; give RUN_DIR" in refusal(capsys, folder, out)
    begin(checkpoints, 30)
    assert "step_30.tmp is not complete" in refusal(capsys, checkpoints / "step_30.tmp", out)
    assert not out.exists()


@pytest.mark.parametrize("file", ["learner/__0_0.distcp", "learner/.metadata", "complete.json", "driver.json"])
def test_a_truncated_checkpoint_is_refused_and_its_file_named(
    folder: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = folder / "run" / "checkpoints" / "step_20" / file
    damaged.write_bytes(damaged.read_bytes()[:-50])
    said = refusal(capsys, folder / "run", folder / "out")
    assert re.search(rf"{file} is (truncated|damaged)", said)
    assert not (folder / "out").exists()


def test_a_configuration_that_is_missing_or_of_another_model_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, config = folder / "out", folder / "run" / "config.yaml"
    text = config.read_text()
    config.unlink()
    assert f"{config} does not exist; name the run's config.yaml with --config" in refusal(capsys, folder / "run", out)
    (folder / "mine.yaml").write_text(text)
    config.write_text(text.replace("rollout_dtype: float32", "rollout_dtype: float7"))
    assert "model.rollout_dtype = float7" in refusal(capsys, folder / "run", out)
    other = save_tiny(folder / "other", "llama")
    config.write_text(text)
    assert "model.path is another model" in refusal(capsys, folder / "run", out, "--model", other)
    config.write_text("7")
    assert "holds no configuration" in refusal(capsys, folder / "run", out)
    assert [path.name for path in folder.iterdir() if path.name.startswith("out")] == []
    assert main([str(folder / "run"), str(out), "--config", str(folder / "mine.yaml")]) == 0


def test_an_output_that_cannot_be_written_is_a_failure_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("x")
    assert main([str(folder / "run"), str(folder / "file" / "out")]) == 1
    assert "is not written: NotADirectoryError" in capsys.readouterr().err


def test_buffers_that_no_optimizer_moves_come_from_the_model(tmp_path: Path) -> None:
    """A router's correction bias, which the files of a model hold and checkpoints do not."""
    tiny: Any = {**TINY, "num_key_value_heads": 4}
    config = DeepseekV3Config(
        **tiny, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=8, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith("e_score_correction_bias")]
    tensors[name] += 0.25
    save_file(tensors, file, metadata={"format": "pt"})
    cfg = run_config(tmp_path / "model")
    save(replace(cfg, model=replace(cfg.model, rollout_dtype="bfloat16")), tmp_path / "run", 3)
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported[name].equal(tensors[name])
    assert exported["model.norm.weight"].eq(3).all()


def test_the_help_says_what_the_arguments_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("CHECKPOINT", "OUT", "--model", "--config", "Memory:", "Exit codes: 0"))
