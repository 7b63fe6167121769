"""Command line -> `trainer --dry-run`: its options, what it refuses as a start would, and where actors are placed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import Qwen2Config

from tests.fakes.learner import KINDS
from tests.fakes.model_7b import config
from trainer.__main__ import main
from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.cli import parse
from trainer.config.compose import load_config, resolve
from trainer.driver.datasets import make_source
from trainer.driver.placement import Node, assign_nodes, check_fits, plan_placement
from trainer.driver.preflight import check_inputs, preflight
from trainer.errors import ConfigurationError
from trainer.learner import checkpoint
from trainer.tools.dry_run import describe_placement, dry_run, numbered
from weight_sync.device.select import build

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.tools.dry_run import PlacementPlan

Trainer = Callable[..., tuple[int, str, str]]
RANDOM = ("model.path=model", "model.random_weights=true")
ELSEWHERE = ("--dry-run", "--device-memory-gib", "80")


@pytest.fixture
def run_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trainer:
    """Runs the command line in `tmp_path`, where `model` has a config and a tokenizer, and no weights: (exit code,
    stdout, stderr with single spaces)."""
    monkeypatch.chdir(tmp_path)
    KINDS["qwen2"]().save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")

    def run(*args: str) -> tuple[int, str, str]:
        code, shown = main(args), capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, " ".join(shown.err.split())

    return run


def test_a_plan_is_printed_and_nothing_is_started(tmp_path: Path, run_trainer: Trainer) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run_trainer("--dry-run", *RANDOM, "mode.max_staleness=2", "algorithm=ppo", "correction=tis")
    assert code == 0, err
    assert out.startswith("objective: gae(gae_gamma=1, gae_lambda=1), whitened -> ppo_clip("), err
    for words in ("clamp [..2]", "critic: own backbone, lr ", "(2 + 1) x 64 = 192 groups", "weight sync (2 slots)"):
        assert words in out
    assert sorted(tmp_path.rglob("*")) == before, "a dry run leaves nothing behind"


def test_the_options_belong_together() -> None:
    line = parse(["--dry-run", "--device-memory-gib", "80", "--response-tokens", "966.5", "--nodes", "0,8", "seed=1"])
    assert (line.action, line.device_memory_gib, line.overrides) == ("dry_run", 80.0, ("seed=1",))
    assert (line.response_tokens, line.nodes) == (966.5, (0, 8)), "a driver's node without any"
    assert (parse([]).action, parse(["--dry-run"]).nodes) == ("run", None)
    for option in ("--device-memory-gib", "--response-tokens"):
        for wrong in ([option, "80"], ["--dry-run", option, "0"], ["--dry-run", option, "nan"]):
            with pytest.raises(ConfigurationError, match=option):
                parse(wrong)
    for wrong in (["--nodes", "8"], ["--cfg", "job", "--nodes", "8"]):
        with pytest.raises(ConfigurationError, match=r"(?s)--nodes = 8.*only --dry-run plans.*ray\.address"):
            parse(wrong)


@pytest.mark.parametrize("given", ["", "0", "0,0", "-8", "8,", "8,,8", "8.0", "8;8", "8, 8", "eight"])
def test_devices_of_nodes_are_integers(given: str) -> None:
    with pytest.raises(ConfigurationError, match="must be integers with commas between them, not all 0") as caught:
        parse(["--dry-run", f"--nodes={given}"])
    assert (f"--nodes = {given}" if given else "--nodes\n") in str(caught.value)


PAIRED = "every device has one learner rank and one engine worker"


@pytest.mark.parametrize(
    ("arguments", "planned", "words"),
    [
        # After the plan, where it could be made
        ("--dry-run --device-memory-gib 24 model.path=large learner.activation_checkpointing=true", True,
         "a learner device has 24.00 GiB"),
        ("--dry-run --device-memory-gib 80 --nodes 3,3 learner.num_ranks=2 rollout.tensor_parallel_size=4", True,
         "no node has 1 CPU + 4 GPU, and an actor is on one node"),
        ("--dry-run --device-memory-gib 80 --nodes 8 mode=colocated learner.num_ranks=3 rollout.num_replicas=2", True,
         "1 configuration error"),
        *((f"--dry-run {where} --nodes 8,8 device=cpu", False, "--nodes = 8,8 counts accelerators, and the device is")
          for where in ("", "--device-memory-gib 80")),
        ("--dry-run device=cuda ray.address=auto", False, "--device-memory-gib N"),
    ],
)  # fmt: skip
def test_what_does_not_fit_ends_with_code_2(
    tmp_path: Path, run_trainer: Trainer, arguments: str, planned: bool, words: str
) -> None:
    if "device=cuda" in arguments and build("cuda").is_available():
        pytest.skip("this machine has the device")
    large = Qwen2Config(vocab_size=128, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32)
    large.save_pretrained(tmp_path / "large")
    build_tokenizer().save_pretrained(tmp_path / "large")
    code, out, err = run_trainer(*RANDOM, "learner.max_tokens_per_micro_batch=1024", *arguments.split())
    assert (code, "Per learner device" in out or "Per device in the learner's turn" in out) == (2, planned)
    assert "node 0 (" not in out
    assert words in err
    assert err.count(PAIRED) == int("mode=colocated" in arguments), "it is reported once"


QWEN = {  # hidden, intermediate, layers, heads, heads of keys and values
    "grpo_0.5b": (896, 4864, 24, 14, 2),
    "grpo_1.5b": (1536, 8960, 28, 12, 2),
}


@pytest.mark.parametrize("name", QWEN)
def test_a_configuration_for_one_device_of_80_gib_fits_and_generates_in_one_wave(
    tmp_path: Path, run_trainer: Trainer, name: str
) -> None:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(keys, QWEN[name], strict=True))
    Qwen2Config(vocab_size=151936, tie_word_embeddings=True, **sizes).save_pretrained(tmp_path / "model")
    code, out, err = run_trainer("--config-name", name, *ELSEWHERE, *RANDOM, "task=arithmetic")
    assert code == 0, err
    assert "may not fit" not in out
    assert "rollout.max_num_seqs=512 sequences at once per engine (auto: all 512" in out
    assert "1 devices, one FSDP2 rank each" in out.replace(" shared with the engines", "")


def save_checkpoint(run_dir: Path, state: dict[str, Any]) -> Path:
    tmp = checkpoint.begin(run_dir / "checkpoints", 5)
    (tmp / "weights").write_bytes(b"w" * 100)
    return checkpoint.commit(tmp, {"run": {"step": 5}, "buffer": {"prompts": []}, **state})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("model.random_weights=false", "has no weights (found ['chat_template.jinja', 'config.json'"),
        ("task.curriculum=easy_to_hard task.difficulty_column=hardness", "(task.difficulty_column) is null"),
        ("model.lora.rank=8", "must be a directory with weights: with model.lora.rank engines load them"),
        ("run_dir=before", "step_5/weights is truncated"),
        ("task.agent=nowhere.py:make", "nowhere.py"),
    ],
)
def test_what_a_run_would_refuse_is_refused_for_devices_elsewhere_too(
    tmp_path: Path, run_trainer: Trainer, overrides: str, words: str
) -> None:
    (save_checkpoint(tmp_path / "before", {}) / "weights").write_bytes(b"w")
    rows = [{"q": "1+1=", "a": "2", "hardness": 1}, {"q": "1+2=", "a": "3", "hardness": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("task.train_path=./rows.jsonl", "task.prompt_column=q", "task.answer_column=a")
    silent = ("task.eval_path=", "trainer.eval_every=0", "trainer.stop_at_accuracy=null")
    for options in (("--dry-run",), ELSEWHERE):
        code, out, err = run_trainer(*options, *RANDOM, *columns, *silent, *overrides.split())
        assert (code, out) == (2, "")
        assert words in err


def test_a_run_on_devices_elsewhere_resumes_from_a_checkpoint_of_their_kind(
    tmp_path: Path, run_trainer: Trainer
) -> None:
    """The kind of that device is unknown here, and random weights are made on it."""
    keys = (f"model.path={tmp_path / 'model'}", "model.random_weights=true", "algorithm.kl.coef=0.1")
    cfg, problems = resolve(parse(list(keys)))
    assert not problems
    source = make_source(cfg, check_inputs(cfg)[0].train, None).state_dict()
    began = {"model.path": cfg.model.path, "seed": cfg.seed, "device.name": "npu"}
    save_checkpoint(tmp_path / "before", {"origin": began, "source": source})
    for options, exit_code, words in (
        (("--dry-run",), 2, "must stay npu"),
        ((*ELSEWHERE, "device=auto"), 0, ""),
        ((*ELSEWHERE, "device=npu"), 0, ""),
        ((*ELSEWHERE, "seed=7"), 2, "seed = 7"),
    ):
        code, _, err = run_trainer(*options, *keys, "run_dir=before")
        assert code == exit_code and words in err, err


def test_the_mean_of_the_responses_reaches_the_plan(run_trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    few = "task.eval_sets={few: {path: builtin:arithmetic, size: 8, samples: 5}, all: {path: builtin:arithmetic}}"
    evaluation = ("trainer.eval_samples=64", "trainer.eval_temperature=1.0", few)
    cfg, problems = resolve(parse(["--dry-run", *RANDOM, "rollout.max_response_tokens=12", *evaluation]))
    assert not problems
    num_held_out = len(check_inputs(cfg)[0].evaluation[0].prompts)
    dry_run(cfg, device_memory_gib=80.0, response_tokens=5.0)
    out = capsys.readouterr().out
    assert "5 tokens, on average" in out and "12 tokens" not in out
    asked = re.search(r"([\d,]+) responses of an evaluation", out)
    assert asked and int(asked[1].replace(",", "")) == 64 * num_held_out + 8 * 5 + 64 * 250
    silent = replace(cfg, trainer=replace(cfg.trainer, eval_every=0, eval_at_start=False, eval_at_end=False))
    dry_run(silent, device_memory_gib=80.0, response_tokens=None)
    out = capsys.readouterr().out
    assert "12 tokens, the longest" in out and "of an evaluation" not in out
    with pytest.raises(ConfigurationError, match="--response-tokens = 13"):
        dry_run(cfg, device_memory_gib=80.0, response_tokens=13.0)


# Placement on nodes: what is refused is refused as a start refuses it


def sized(ranks: int, replicas: int, tp: int, *, mode: str = "async", workers: int = 1) -> RunConfig:
    rollout = {"num_replicas": replicas, "tensor_parallel_size": tp, "num_workers": workers}
    return config(learner={"num_ranks": ranks}, rollout=rollout, mode={"name": mode})


def placed(cfg: RunConfig, *counts: int) -> PlacementPlan:
    return describe_placement(cfg, counts, backend="fast", resource="GPU")


def test_every_node_has_a_line_with_who_is_there_and_what_is_free() -> None:
    placement = placed(sized(4, 3, 2, workers=64), 8, 8, 1)
    assert not placement.problems, "CPUs of the nodes are assumed to suffice"
    assert [line.strip() for line in placement.lines[1:]] == [
        "node 0 (8 devices): learner ranks 0-3; replica_1 (2); rollout workers 0-63; 2 free",
        "node 1 (8 devices): replica_0 (2), replica_2 (2); 4 free",
        "node 2 (1 device): no actor; 1 free",
    ]
    colocated = placed(sized(4, 2, 2, mode="colocated"), 3, 3)
    assert [line.strip() for line in colocated.lines[1:]] == [
        "node 0 (3 devices): learner ranks 0-1; replica_0 (2, with ranks 0-1); rollout worker 0; 1 free",
        "node 1 (3 devices): learner ranks 2-3; replica_1 (2, with ranks 2-3); 1 free",
    ]
    assert numbered("rank", [0, 1, 4, 6, 7]) == "ranks 0-1, 4, 6-7"


def refusal_of_a_start(cfg: RunConfig, counts: tuple[int, ...], cpus: int) -> str:
    """In the order of a run that joins a cluster."""
    with pytest.raises(ConfigurationError) as caught:
        bundles = plan_placement(cfg, resource="GPU")
        check_fits(cfg, bundles, backend="fast", num_devices=sum(counts), where="the Ray cluster")
        nodes = [
            Node(node_id=f"id{i}", address=f"node {i}", resources={"CPU": cpus, "GPU": count}, is_driver=i == 0)
            for i, count in enumerate(counts)
        ]
        assign_nodes(bundles, nodes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cfg", "counts", "cpus", "words"),
    [
        (sized(4, 4, 2), (4, 4), 0, "the Ray cluster has 8 fast devices"),
        (sized(2, 1, 4), (3, 3), 4, "no node has 1 CPU + 4 GPU"),
        (sized(1, 3, 2), (3, 3, 1), 5, "must fit on the 3 nodes of the Ray cluster: node 0 (driver): "),
        (sized(4, 2, 2, mode="colocated"), (1, 3), 7, "4 learners of 1 CPU + 1 GPU, 2 replicas of 1 CPU"),
        (sized(3, 2, 1, mode="colocated"), (8,), 0, PAIRED),
    ],
)
def test_what_cannot_be_placed_is_refused_in_the_words_of_a_start(
    cfg: RunConfig, counts: tuple[int, ...], cpus: int, words: str
) -> None:
    placement = placed(cfg, *counts)
    assert len(placement.lines) == 1, "no actor has a place"
    text = str(ConfigurationError(placement.problems))
    assert words in text
    assert text == refusal_of_a_start(cfg, counts, cpus)


# Models of the hub


NAME = "tandem-tests/seven"
SHORT = ("task.max_prompt_tokens=200", "rollout.max_response_tokens=56")
"""The whole context of the model."""


@pytest.fixture
def cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """28 heads and 4 of keys and values, as Qwen2.5-7B has; its weights are not in the cache yet."""
    hub = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    Qwen2Config(
        vocab_size=128, hidden_size=28 * 4, intermediate_size=64, num_hidden_layers=2, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=256,
    ).save_pretrained(hub / "snapshots" / "abc")  # fmt: skip
    build_tokenizer().save_pretrained(hub / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return hub / "snapshots" / "abc"


@pytest.mark.usefixtures("cached_model")
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.tensor_parallel_size=7", f"must divide the 4 key-value heads of {NAME}, or be a multiple"),
        ("rollout.max_response_tokens=57", f"need 257 tokens, but the context of {NAME} has 256"),
    ],
)
def test_what_engines_would_refuse_of_a_model_of_the_hub_is_refused_before_they_start(
    override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (f"model.path={NAME}", "device=cpu", *SHORT, override)
    assert main(["--dry-run", *keys]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in " ".join(err.split())
    with pytest.raises(ConfigurationError) as caught:
        preflight(load_config(keys))
    assert words in " ".join(str(caught.value).split())


def test_what_is_known_of_a_model_before_it_is_there_is_checked(cached_model: Path) -> None:
    tokenizer = f"model.tokenizer_path={NAME}"
    preflight(load_config([f"model.path={NAME}", tokenizer, "device=cpu", *SHORT]))
    preflight(load_config(["model.path=tandem-tests/not-cached", tokenizer, "device=cpu", *SHORT]))  # the learner's job
    with pytest.raises(ConfigurationError, match="must divide the 2 attention heads of builtin:tiny"):
        preflight(load_config(["device=cpu", "rollout.tensor_parallel_size=4"]))
    (cached_model / "config.json").write_text('{"model_type": "vit", "hidden_size": 32}')
    with pytest.raises(ConfigurationError, match=r"model\.path = tandem-tests/seven"):
        preflight(load_config([f"model.path={NAME}", "device=cpu", *SHORT]))
