"""`python -m trainer --dry-run`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import Qwen2Config

from tests.fakes.learner import KINDS
from trainer.__main__ import main
from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.cli import parse
from trainer.config.compose import resolve
from trainer.driver.datasets import training_source
from trainer.driver.preflight import check_inputs
from trainer.errors import ConfigurationError
from trainer.learner import checkpoint
from trainer.tools.dry_run import dry_run
from weight_sync.device.select import build

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


def drawn(model: Path) -> tuple[str, str]:
    """Overrides that name such a directory."""
    return f"model.path={model}", "model.random_weights=true"


def test_a_plan_is_printed_and_nothing_is_started(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run_trainer("--dry-run", *drawn(model), "mode.max_staleness=2")
    assert code == 0, err
    assert "(2 + 1) x 64 = 192 groups" in out
    assert "arenas of weight sync (2 slots)" in out
    assert sorted(tmp_path.rglob("*")) == before, "a dry run leaves nothing behind"


@pytest.mark.parametrize("options", [("--dry-run",), ("--dry-run", "--device-memory-gib", "80")])
def test_weights_that_are_missing_are_refused_unless_they_are_to_be_drawn(
    tmp_path: Path, run_trainer: Callable[..., Any], options: tuple[str, ...]
) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    code, out, err = run_trainer(*options, f"model.path={model}")
    assert (code, out) == (2, "")
    assert "has no weights (found ['chat_template.jinja', 'config.json'" in err and "model.random_weights=true" in err


def test_the_objective_is_told_before_anything_is_started(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    _, out, err = run_trainer("--dry-run", *drawn(model), "algorithm=ppo", "correction=tis")
    assert out.startswith("objective: gae(gae_gamma=1, gae_lambda=1), whitened -> ppo_clip("), err
    assert "clamp [..2]" in out
    assert "critic: own backbone, lr " in out


def test_what_cannot_fit_ends_with_code_2_after_the_plan(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    large = Qwen2Config(vocab_size=128, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32)
    model = model_directory(tmp_path / "model", large)
    short = ("learner.max_tokens_per_micro_batch=1024", "learner.activation_checkpointing=true")
    code, out, err = run_trainer("--dry-run", "--device-memory-gib", "24", *drawn(model), *short)
    assert code == 2
    assert "Per learner device" in out
    assert "learner.num_ranks" in err
    assert "a learner device has 24.00 GiB" in err
    assert "Traceback" not in err


def test_the_options_belong_together() -> None:
    line = parse(["--dry-run", "--device-memory-gib", "80", "--response-tokens", "966.5", "seed=1"])
    assert (line.action, line.device_memory_gib, line.overrides) == ("dry_run", 80.0, ("seed=1",))
    assert line.response_tokens == 966.5
    assert parse([]).action == "run"
    for option in ("--device-memory-gib", "--response-tokens"):
        for wrong in ([option, "80"], ["--dry-run", option, "0"], ["--dry-run", option, "nan"]):
            with pytest.raises(ConfigurationError, match=option):
                parse(wrong)


@pytest.mark.parametrize("given", ["", "0", "0,0", "-8", "8,", "8,,8", "8.0", "8;8", "8, 8", "eight"])
def test_devices_of_nodes_are_integers(given: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(["--dry-run", f"--nodes={given}"])
    text = str(caught.value)
    assert f"--nodes = {given}" in text if given else "--nodes\n" in text
    assert "must be integers with commas between them, not all 0" in text
    assert "--nodes 8,8,8" in text


def test_nodes_are_given_in_order_and_to_a_dry_run_only() -> None:
    assert parse(["--dry-run", "--nodes", "8,4,16", "seed=1"]).nodes == (8, 4, 16)
    assert parse(["--dry-run", "--nodes", "0,8"]).nodes == (0, 8), "a driver's node without any"
    assert parse(["--dry-run"]).nodes is None
    for wrong in (["--nodes", "8"], ["--cfg", "job", "--nodes", "8"]):
        with pytest.raises(ConfigurationError, match=r"(?s)--nodes = 8.*only --dry-run plans.*ray\.address"):
            parse(wrong)
    with pytest.raises(ConfigurationError, match="--nodes"):
        parse(["--dry-run", "--nodes"])


ELSEWHERE = ("--dry-run", "--device-memory-gib", "80")


def test_who_sits_where_is_part_of_the_placement(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    sizes = ("learner.num_ranks=8", "rollout.num_replicas=8", "rollout.tensor_parallel_size=2")
    code, out, err = run_trainer(*ELSEWHERE, "--nodes", "8,8,8", *drawn(model), *sizes)
    assert code == 0, err
    placement = out.partition("\nPlacement\n")[2].partition("\n\n")[0]
    head, *seats = placement.splitlines()[-4:]
    assert head.startswith(
        "  nodes           3, joined with ray.address=auto; assumed: the driver on node 0, and on each"
    )
    assert seats == [
        "  node 0 (8 devices): learner ranks 0-7; rollout worker 0; 0 free",
        "  node 1 (8 devices): replica_0 (2), replica_2 (2), replica_4 (2), replica_6 (2); 0 free",
        "  node 2 (8 devices): replica_1 (2), replica_3 (2), replica_5 (2), replica_7 (2); 0 free",
    ]
    _, silent, _ = run_trainer(*ELSEWHERE, *drawn(model), *sizes)
    assert "node" not in silent
    served = re.compile(r"each learner rank serves ([\d.]+) MiB to engines that hand it on")
    two, one = served.search(out), served.search(silent)
    assert two and one and float(two[1]) == pytest.approx(2 * float(one[1]), rel=0.1), "engines are on two nodes"


def test_given_nodes_are_a_cluster_that_is_joined_and_not_this_host(
    tmp_path: Path, run_trainer: Callable[..., Any]
) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    private_store = r"Object store of Ray, at most\n(  .*\n)*?  together .* of 0\.25 GiB"
    for nodes, is_private in (((), True), (("--nodes", "8"), False)):
        code, out, err = run_trainer(*ELSEWHERE, *nodes, *drawn(model))
        assert code == 0, err
        assert bool(re.search(private_store, out)) == is_private


def test_what_cannot_be_seated_ends_with_code_2_after_the_plan(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    sizes = ("learner.num_ranks=2", "rollout.num_replicas=1", "rollout.tensor_parallel_size=4")
    code, out, err = run_trainer(*ELSEWHERE, "--nodes", "3,3", *drawn(model), *sizes)
    assert code == 2
    assert "Per learner device" in out
    assert "node 0 (" not in out
    assert "no node has 1 CPU + 4 GPU, and an actor is on one node" in err


def test_a_pairing_that_cannot_be_is_refused_once(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    sizes = ("mode=colocated", "learner.num_ranks=3", "rollout.num_replicas=2")
    code, _, err = run_trainer(*ELSEWHERE, "--nodes", "8", *drawn(model), *sizes)
    assert code == 2
    assert "1 configuration error" in err
    assert err.count("every device has one learner rank and one engine worker") == 1


def test_processes_on_a_cpu_are_not_seated_by_devices(tmp_path: Path, run_trainer: Callable[..., Any]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    for options in (("--dry-run",), ELSEWHERE):
        code, out, err = run_trainer(*options, "--nodes", "8,8", *drawn(model), "device=cpu")
        assert (code, out) == (2, "")
        assert "--nodes = 8,8\n    counts accelerators, and the device is cpu" in err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.curriculum=easy_to_hard", "task.difficulty_column=hardness"], "(task.difficulty_column) is null"),
        (["model.lora.rank=8"], "must be a directory with weights: with model.lora.rank engines load them"),
        (["run_dir=before"], "step_5/weights is truncated"),
        (["task.agent=nowhere.py:make"], "nowhere.py"),
    ],
)
def test_what_a_run_would_refuse_is_refused_for_devices_elsewhere_too(
    tmp_path: Path, run_trainer: Callable[..., Any], overrides: list[str], words: str
) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    damaged = save_checkpoint(tmp_path / "before", {})
    (damaged / "weights").write_bytes(b"w")
    rows = [{"q": "1+1=", "a": "2", "hardness": 1}, {"q": "1+2=", "a": "3", "hardness": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("task.train_path=./rows.jsonl", "task.prompt_column=q", "task.answer_column=a")
    silent = ("task.eval_path=", "trainer.eval_every=0", "trainer.stop_at_accuracy=null")
    for options in (("--dry-run",), ELSEWHERE):
        code, out, err = run_trainer(*options, *drawn(model), *columns, *silent, *overrides)
        assert (code, out) == (2, "")
        assert words in " ".join(err.split())


def save_checkpoint(run_dir: Path, state: dict[str, Any]) -> Path:
    tmp = checkpoint.begin(run_dir / "checkpoints", 5)
    (tmp / "weights").write_bytes(b"w" * 100)
    return checkpoint.commit(tmp, {"run": {"step": 5}, "buffer": {"prompts": []}, **state})


def test_a_run_on_devices_elsewhere_goes_on_from_a_checkpoint_of_their_kind(
    tmp_path: Path, run_trainer: Callable[..., Any]
) -> None:
    """Nothing here can tell which kind of device that is, and weights are drawn on it."""
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    keys = (*drawn(model), "algorithm.kl.coef=0.1")
    cfg, problems = resolve(parse(list(keys)))
    assert not problems
    source = training_source(cfg, check_inputs(cfg).train).state_dict()
    began = {"model.path": str(model), "seed": cfg.seed, "device.name": "npu"}
    save_checkpoint(tmp_path / "before", {"origin": began, "source": source})
    code, _, err = run_trainer("--dry-run", *keys, "run_dir=before")
    assert code == 2 and "must stay npu" in err
    for device in ("auto", "npu"):
        code, _, err = run_trainer(*ELSEWHERE, *keys, "run_dir=before", f"device={device}")
        assert code == 0, err
    code, _, err = run_trainer(*ELSEWHERE, *keys, "run_dir=before", "seed=7")
    assert code == 2 and "seed = 7" in err


def test_the_mean_of_the_answers_reaches_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_directory(tmp_path / "model", KINDS["qwen2"]())
    few = "task.eval_sets={few: {path: builtin:arithmetic, size: 8, samples: 5}, all: {path: builtin:arithmetic}}"
    evaluation = ("trainer.eval_samples=64", "trainer.eval_temperature=1.0", few)
    overrides = (*drawn(model), "rollout.max_response_tokens=12", *evaluation)
    cfg, problems = resolve(parse(["--dry-run", *overrides]))
    assert not problems
    num_held_out = len(check_inputs(cfg).evaluation[0].prompts)
    dry_run(cfg, device_memory_gib=80.0, response_tokens=5.0)
    out = capsys.readouterr().out
    assert "5 tokens, on average" in out
    assert "12 tokens" not in out
    asked = re.search(r"([\d,]+) answers of an evaluation", out)
    assert asked and int(asked[1].replace(",", "")) == 64 * num_held_out + 8 * 5 + 64 * 250
    silent = replace(cfg, trainer=replace(cfg.trainer, eval_every=0, eval_at_start=False, eval_at_end=False))
    dry_run(silent, device_memory_gib=80.0, response_tokens=None)
    out = capsys.readouterr().out
    assert "12 tokens, the longest" in out
    assert "of an evaluation" not in out
    with pytest.raises(ConfigurationError, match="--response-tokens = 13"):
        dry_run(cfg, device_memory_gib=80.0, response_tokens=13.0)


def test_devices_that_are_elsewhere_have_a_size_that_must_be_told(run_trainer: Callable[..., Any]) -> None:
    if build("cuda").is_available():
        pytest.skip("this machine has the device")
    code, _, err = run_trainer("--dry-run", "device=cuda", "ray.address=auto")
    assert code == 2
    assert "--device-memory-gib N" in err and "Traceback" not in err
