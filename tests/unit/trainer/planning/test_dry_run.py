"""`python -m trainer --dry-run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import Qwen2Config

from tests.fakes.learner import KINDS
from trainer.__main__ import main
from trainer.builtin.tokenizer import build_tokenizer
from trainer.config.command_line import parse
from trainer.config.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def run_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in `tmp_path`: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        code = main(args)
        return code, *capsys.readouterr()

    return run


def model_directory(path: Path, config: Qwen2Config) -> Path:
    """A config and a tokenizer, and no weights."""
    config.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def test_a_plan_is_printed_and_nothing_is_started(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run_trainer("--dry-run", f"model.path={model}", "mode.max_staleness=2")
    assert code == 0, err
    assert "(2 + 1) x 64 = 192 groups" in out
    assert "arenas of weight sync (2 slots)" in out
    assert sorted(tmp_path.rglob("*")) == before, "a dry run leaves nothing behind"


def test_the_objective_is_told_before_anything_is_started(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    _, out, err = run_trainer("--dry-run", f"model.path={model}", "algorithm=ppo", "correction=tis")
    assert out.startswith("objective: gae(gae_gamma=1, gae_lambda=1), whitened -> ppo_clip("), err
    assert "clamp [..2]" in out
    assert "critic: own backbone, lr " in out


def test_what_cannot_fit_ends_with_code_2_after_the_plan(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    large = Qwen2Config(vocab_size=16, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32)
    model = model_directory(tmp_path / "model", large)
    short = ("learner.max_tokens_per_micro_batch=1024", "learner.activation_checkpointing=true")
    code, out, err = run_trainer("--dry-run", "--device-memory-gib", "24", f"model.path={model}", *short)
    assert code == 2
    assert "Per learner device" in out
    assert "learner.num_ranks" in err
    assert "a learner device has 24.00 GiB" in err
    assert "Traceback" not in err


def test_a_damaged_configuration_is_refused_before_anything_is_planned(run_trainer: Callable[..., Any]) -> None:
    code, out, _ = run_trainer("--dry-run", "mode.max_staleness=-1")
    assert (code, out) == (2, "")


def test_the_options_belong_together() -> None:
    line = parse(["--dry-run", "--device-memory-gib", "80", "seed=1"])
    assert (line.action, line.device_memory_gib, line.overrides) == ("dry_run", 80.0, ("seed=1",))
    assert parse([]).action == "run"
    for wrong in (["--device-memory-gib", "80"], ["--dry-run", "--device-memory-gib", "0"]):
        with pytest.raises(ConfigurationError, match="--device-memory-gib"):
            parse(wrong)
