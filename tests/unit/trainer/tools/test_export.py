"""Checkpoint -> model directory: where `python -m trainer export` finds what it needs, and what it refuses."""

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

from tests.fakes.learner import TINY, drawn_config, make_learner, process_group, run_config, save_tiny
from trainer.config.plain import dump_yaml
from trainer.config.schema import LoraConfig
from trainer.driver.checkpointing import origin
from trainer.learner.checkpoint import begin, commit
from trainer.tools.export import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainer.config.schema import RunConfig

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(tmp_path_factory.mktemp("group") / "store"):
        yield


def save(cfg: RunConfig, run_dir: Path, *steps: int) -> None:
    """Checkpoints of a learner all of whose weights are the step."""
    learner = make_learner(cfg)
    for step in steps:
        with torch.no_grad():
            for param in learner.model.parameters():
                param.fill_(step)
        tmp = begin(run_dir / "checkpoints", step)
        learner.save(tmp, step=step)
        commit(tmp, {"origin": origin(cfg)})
    (run_dir / "config.yaml").write_text(dump_yaml(cfg))


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


@pytest.fixture
def export(capsys: Capture) -> Callable[..., str]:
    """`export(CHECKPOINT, OUT, ...)` returns what is printed; the error with another exit code."""

    def run(*args: Path | str, code: int = 0) -> str:
        capsys.readouterr()
        ended, (out, err) = main([str(arg) for arg in args]), capsys.readouterr()
        assert (ended, bool(out), "%|" in err) == (code, code == 0, False), err  # no progress bar
        return out if code == 0 else err

    return run


def exported_step(out: Path) -> float:
    return float(load_file(out / "model.safetensors")["model.norm.weight"][0])


@pytest.mark.parametrize(
    ("given", "step"),
    [
        ("run", 20),
        ("run/checkpoints", 20),
        ("run/checkpoints/step_5", 5),
        ("link", 5),
        ("run/checkpoints/abandoned/step_5", 5),
    ],
)
def test_a_checkpoint_is_found_by_any_name(folder: Path, given: str, step: int, export: Callable[..., str]) -> None:
    checkpoints = folder / "run" / "checkpoints"
    (folder / "link").symlink_to(checkpoints / "step_5")
    (checkpoints / "abandoned").mkdir()
    if "abandoned" in given:
        (checkpoints / "step_5").rename(folder / given)
    assert export(folder / given, folder / "out").startswith(f"wrote {folder / 'out'} from ")
    assert exported_step(folder / "out") == step


def test_an_empty_directory_is_filled_and_any_other_is_left_alone(folder: Path, export: Callable[..., str]) -> None:
    out, run = folder / "out", folder / "run"
    out.mkdir()
    export(run, out)
    before = sorted(out.iterdir())
    assert "out is not empty; give a directory that" in export(run, out, code=2)
    assert sorted(out.iterdir()) == before
    assert "config.json is a file" in export(run, out / "config.json", code=2)
    (folder / "next.tmp").mkdir()
    assert "next.tmp exists, where next is written first" in export(run, folder / "next", code=2)
    assert (folder / "next.tmp").is_dir()


def test_model_and_tokenizer_are_found_from_anywhere_and_named_if_they_were_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Callable[..., str]
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
    export("../run", "out")
    assert exported_step(Path("out")) == 5
    assert Path("out/tokenizer_config.json").read_text() == '{"of": "the run"}'
    (tmp_path / "model").rename(tmp_path / "moved")
    error = export("../run", "again", code=2)
    assert "is not a directory" in error and "--model" in error
    export("../run", "again", "--model", "../moved")


def test_adapters_over_a_model_from_the_seed_are_refused(tmp_path: Path, export: Callable[..., str]) -> None:
    """The seed gives other numbers on the device that the run had."""
    model = save_tiny(tmp_path / "model")
    (model / "model.safetensors").unlink()
    cfg = run_config(model)
    save(replace(cfg, model=replace(cfg.model, random_weights=True, lora=LoraConfig(rank=4))), tmp_path / "run", 5)
    error = export(tmp_path / "run", tmp_path / "out", code=2)
    assert "has no weights: below its adapters the run had a model" in error
    assert not (tmp_path / "out").exists()


def test_a_run_whose_first_weights_were_drawn_is_exported(tmp_path: Path, export: Callable[..., str]) -> None:
    model = save_tiny(tmp_path / "model")
    (model / "model.safetensors").unlink()
    cfg = drawn_config(model)
    save(cfg, tmp_path / "run", 5)
    export(tmp_path / "run", tmp_path / "out")
    assert exported_step(tmp_path / "out") == 5
    assert make_learner(cfg).load(tmp_path / "run" / "checkpoints" / "step_5") == 5
    make_learner(run_config(tmp_path / "out"))  # has weights of its own


def test_what_is_no_checkpoint_is_refused(folder: Path, export: Callable[..., str]) -> None:
    out, checkpoints = folder / "out", folder / "run" / "checkpoints"
    assert "step_6 is not a directory; give RUN_DIR" in export(checkpoints / "step_6", out, code=2)
    assert "holds no checkpoint; give RUN_DIR" in export(folder, out, code=2)
    begin(checkpoints, 30)
    assert "step_30.tmp is not complete" in export(checkpoints / "step_30.tmp", out, code=2)
    for file in ("learner/__0_0.distcp", "learner/.metadata", "complete.json", "driver.json"):
        damaged = checkpoints / "step_20" / file
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-50])
        assert re.search(rf"{file} is (truncated|damaged)", export(folder / "run", out, code=2))
        damaged.write_bytes(whole)
    assert not out.exists()
    (folder / "file").touch()
    assert "is not written: NotADirectoryError" in export(folder / "run", folder / "file" / "out", code=1)


def test_a_configuration_that_is_missing_or_of_another_model_is_refused(
    folder: Path, export: Callable[..., str]
) -> None:
    out, config = folder / "out", folder / "run" / "config.yaml"
    text = config.read_text()
    config.unlink()
    missing = f"{config} does not exist; name the run's config.yaml with --config"
    assert missing in export(folder / "run", out, code=2)
    (folder / "mine.yaml").write_text(text)
    config.write_text(text.replace("rollout_dtype: float32", "rollout_dtype: float7"))
    assert "model.rollout_dtype = float7" in export(folder / "run", out, code=2)
    config.write_text(text)
    other = save_tiny(folder / "other", "llama")
    assert "model.path is another model" in export(folder / "run", out, "--model", other, code=2)
    config.write_text("7")
    assert "holds no configuration" in export(folder / "run", out, code=2)
    assert not list(folder.glob("out*"))
    export(folder / "run", out, "--config", folder / "mine.yaml")


def test_buffers_that_no_optimizer_moves_come_from_the_model(tmp_path: Path, export: Callable[..., str]) -> None:
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
    export(tmp_path / "run", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported[name].equal(tensors[name])
    assert exported["model.norm.weight"].eq(3).all()


def test_the_help_describes_the_arguments(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("CHECKPOINT", "OUT", "--model", "--config", "Memory:", "Exit codes: 0"))
