"""Replicas (HSDP), context and tensor parallelism on four real ranks (processes with gloo): whatever the layout, a
step, its metrics and its checkpoint are those of one rank."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.fakes.learner import (
    RankPool,
    assert_close,
    gradients,
    logprobs,
    make_learner,
    pack,
    process_group,
    save_tiny,
    with_lora,
)
from tests.fakes.patience import PATIENT_TEST_S
from tests.fakes.rewarded import all_weights, config, rewarded
from trainer.config.algorithm import ClampConfig, CorrectionConfig, RejectConfig
from trainer.learner.checkpoint import begin
from weight_sync.plan.geometry import num_uncovered
from weight_sync.publish.shards import local_shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.policy import PolicyTrainer

pytestmark = [pytest.mark.timeout(PATIENT_TEST_S), pytest.mark.usefixtures("one_rank")]

LAYOUTS: dict[str, dict[str, Any]] = {
    "2 replicas of 2 shards": {"fsdp_size": 2},
    "4 replicas": {"fsdp_size": 1},
    "2 micro-batches of 2 ranks": {"context_parallel_size": 2},
    "one micro-batch, more ranks than key-value heads": {"context_parallel_size": 4, "fsdp_size": 2},
    "2 shards of each half of the matrices": {"tensor_parallel_size": 2},
    "2 replicas of two halves": {"tensor_parallel_size": 2, "fsdp_size": 2, "activation_checkpointing": True},
    "halves, of which the cheap is recomputed": {"tensor_parallel_size": 2, "activation_checkpointing": "selective"},
}
IN_REWARD = {"coef": 0.3, "apply_to": "reward"}
DECOUPLED = CorrectionConfig(
    objective="decoupled", clamp=ClampConfig(upper=1.5), reject=RejectConfig(metric="k2", upper=0.8)
)
JOBS: dict[str, dict[str, Any]] = {
    "gspo": {"advantage_estimator": "grpo", "loss": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
    "gmpo with entropy bonus": {
        "advantage_estimator": "reinforce_pp", "loss": "gmpo", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4,
        "entropy_coef": 0.3,
    },
    "decoupled with rejection": {"advantage_estimator": "grpo", "correction": DECOUPLED},
    "critic, KL in the reward": {
        "critic": {"updates_per_step": 2, "value_clip": 0.1}, "kl": IN_REWARD, "whiten_advantages": True,
    },
    "shared critic": {"critic": {"shared_backbone": True}, "kl": {"coef": 0.3, "apply_to": "loss"}},
    "grpo, KL in the reward": {"advantage_estimator": "grpo", "kl": IN_REWARD},
    "sliding window": {"advantage_estimator": "grpo"},
    "attention sinks": {"advantage_estimator": "grpo"},
    "adapters": {"advantage_estimator": "grpo", "kl": {"coef": 0.3, "apply_to": "loss"}},
}  # fmt: skip
MODELS = {"sliding window": "mistral", "attention sinks": "gpt_oss"}
RESUMED = "critic, KL in the reward"
JOBS_OF = {
    "2 replicas of 2 shards": [RESUMED, "adapters"],
    "4 replicas": [RESUMED],
    "2 micro-batches of 2 ranks": [*JOBS],
    "one micro-batch, more ranks than key-value heads": ["gspo", RESUMED, "sliding window"],
    "2 shards of each half of the matrices": [job for job in JOBS if job not in ("adapters", "attention sinks")],
    "2 replicas of two halves": [RESUMED, "sliding window"],
    "halves, of which the cheap is recomputed": [RESUMED],
}
"""Replicas change where gradients are added up, a context group what a rank computes."""
FULL = {
    "4 replicas", "halves, of which the cheap is recomputed",
    # In test_learner_ranks.py on two ranks:
    "gmpo with entropy bonus", "decoupled with rejection", "shared critic", "grpo, KL in the reward",
}  # fmt: skip


def marks(*words: str) -> Any:
    return () if FULL.isdisjoint(words) else pytest.mark.full


CASES = [pytest.param(layout, job, marks=marks(layout, job)) for layout, jobs in JOBS_OF.items() for job in jobs]
EVERY_LAYOUT = pytest.mark.parametrize("layout", [pytest.param(layout, marks=marks(layout)) for layout in LAYOUTS])
STEPS = 2


def _config(directory: Path, job: str, **learner: Any) -> RunConfig:
    cfg = config(directory / MODELS.get(job, "qwen3"), **JOBS[job])
    if job == "adapters":
        cfg = with_lora(cfg)
    # A norm that is clipped to: it must count every shard once.
    return replace(cfg, learner=replace(cfg.learner, num_ranks=dist.get_world_size(), max_grad_norm=0.05, **learner))


def _share(cfg: RunConfig, parts: list[MicroBatch]) -> list[MicroBatch]:
    """Two micro-batches of this rank, the first of one sequence, whose tokens are fewer than ranks or no multiple."""
    groups = cfg.learner.num_batches
    if groups == dist.get_world_size() == 1:
        return [pack(parts)]
    mine = parts[dist.get_rank() // cfg.learner.ranks_per_batch :: groups]
    return [pack(mine[:1]), pack(mine[1:])]


def _train(learner: PolicyTrainer, cfg: RunConfig, first: int, num_steps: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step in range(first, first + num_steps):
        parts, of_step = rewarded(8, seed=step)
        found = learner.train_step(_share(cfg, _with_advantages(parts)), step=step, **of_step).metrics
        metrics = {name: metric.mean for name, metric in found.items()}
    return metrics


def _with_advantages(parts: list[MicroBatch]) -> list[MicroBatch]:
    """For the jobs whose advantages are final."""
    return [
        replace(part, advantages=(part.loss_mask * (-1.0) ** index).astype("float32"))
        for index, part in enumerate(parts)
    ]


def _work(directory: Path, job: str, layout: str = "") -> dict[str, Any]:
    cfg = _config(directory, job, **LAYOUTS.get(layout, {}))
    learner = make_learner(cfg)
    parts, of_step = rewarded(8, seed=99)
    parts = _with_advantages(parts)
    found: dict[str, Any] = {
        "gradients": gradients(learner, _share(cfg, parts), **of_step),
        "logprobs": logprobs(learner, pack(parts)),
        "metrics": _train(learner, cfg, 0, STEPS),
        "weights": all_weights(learner),
        "published": _published(learner),
    }
    path = directory / f"{job} {layout}".replace(",", "") / f"step_{STEPS}.tmp"
    if dist.get_rank() == 0:
        begin(path.parent, STEPS)
    dist.barrier()
    learner.save(path, step=STEPS, in_background=True)
    if job == "sliding window":
        learner.export_hf(path.parent / "export")
    _train(learner, cfg, STEPS, 1)
    learner.wait_saved()
    return found | {"path": path, "later": all_weights(learner)}


def _published(learner: PolicyTrainer) -> tuple[Any, dict[str, torch.Tensor]]:
    """Boxes of this rank, and what is in them now."""
    _, shards, tensors = local_shards(learner.model, rollout_dtype="float32")
    return shards, {name: tensor.clone() for name, tensor in tensors.items()}


def _continued(directory: Path, job: str, path: Path, layout: str = "") -> dict[str, torch.Tensor]:
    cfg = _config(directory, job, **LAYOUTS.get(layout, {}))
    learner = make_learner(cfg)
    assert learner.load(path) == STEPS
    _train(learner, cfg, STEPS, 1)
    return all_weights(learner)


def _on(layout: str, asked: set[str], directory: Path) -> dict[str, Any]:
    return {job: _work(directory, job, layout) for job in JOBS_OF[layout] if job in asked}


def _after(layout: str, path: Path, directory: Path) -> dict[str, torch.Tensor]:
    return _continued(directory, RESUMED, path, layout)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parallel")
    for kind in ("qwen3", *MODELS.values()):
        save_tiny(path / kind, kind)
    return path


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> set[str]:
    """Layouts and jobs that a selected test looks at."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    return {"sliding window", RESUMED} | {
        call.params[name] for call in calls for name in ("layout", "job") if name in call.params
    }


@pytest.fixture(scope="module")
def four(directory: Path, asked: set[str]) -> Iterator[list[dict[str, Any]]]:
    """Of every rank: each job on each layout, and "resumed": what came of the checkpoint of the layout before it."""
    pool = RankPool(directory, world_size=4)
    layouts = [layout for layout in LAYOUTS if layout in asked]
    found = {layout: pool.run(functools.partial(_on, layout, asked), directory) for layout in layouts}
    paths = {layout: ranks[0][RESUMED]["path"] for layout, ranks in found.items()}
    before = dict(zip(layouts, [layouts[-1], *layouts], strict=False))
    resumed = {
        layout: pool.run(functools.partial(_after, layout, paths[before[layout]]), directory) for layout in layouts
    }
    yield [
        {layout: found[layout][rank] for layout in layouts}
        | {"resumed": {layout: resumed[layout][rank] for layout in layouts}}
        for rank in range(4)
    ]
    pool.close()


@pytest.fixture(scope="module")
def one_rank(directory: Path, four: list[dict[str, Any]]) -> Iterator[None]:
    """This process as the only rank. The other ranks are started before it."""
    del four
    with process_group(directory / "store_of_one"):
        yield


@pytest.fixture(scope="module")
def one(directory: Path, asked: set[str], one_rank: None) -> dict[str, Any]:
    del one_rank
    return {job: _work(directory, job) for job in JOBS if job in asked}


@pytest.mark.parametrize(("layout", "job"), CASES)
def test_a_step_is_that_of_one_rank(layout: str, job: str, one: dict[str, Any], four: list[dict[str, Any]]) -> None:
    expected = one[job]
    for rank in four:
        got = rank[layout][job]
        assert_close(got["gradients"], expected["gradients"], rtol=1e-5)
        torch.testing.assert_close(torch.from_numpy(got["logprobs"]), torch.from_numpy(expected["logprobs"]))
        assert got["metrics"] == pytest.approx(expected["metrics"], rel=1e-3, abs=1e-6)
        assert got["metrics"] == four[0][layout][job]["metrics"], "equal on every rank"
        assert_close(got["later"], expected["later"], rtol=1e-4)


@EVERY_LAYOUT
def test_a_checkpoint_continues_on_another_layout_and_on_one_rank(
    layout: str, directory: Path, four: list[dict[str, Any]]
) -> None:
    for rank in four:
        assert_close(rank["resumed"][layout], rank[layout][RESUMED]["later"], rtol=1e-4)  # all began with equal bits
    of_layout = four[0][layout][RESUMED]
    assert_close(_continued(directory, RESUMED, of_layout["path"]), of_layout["later"], rtol=1e-4)


@EVERY_LAYOUT
def test_published_boxes_hold_the_weights_and_leave_no_gap(layout: str, four: list[dict[str, Any]]) -> None:
    job = JOBS_OF[layout][0]
    boxes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for rank in four:
        shards, tensors = rank[layout][job]["published"]
        for shard in shards:
            box = tuple(slice(start, start + size) for start, size in zip(shard.start, shard.size, strict=True))
            assert tensors[shard.param].equal(rank[layout][job]["weights"][shard.param][box])
            boxes.setdefault(shard.param, set()).add((shard.start, shard.size))
    for name, found in boxes.items():
        assert num_uncovered(tuple(four[0][layout][job]["weights"][name].shape), found) == 0
    starts = {start for start, _ in boxes["model.layers.0.mlp.down_proj.weight"]}
    columns = LAYOUTS[layout].get("tensor_parallel_size", 1)
    assert len({column for _, column in starts}) == columns
    assert len(starts) == LAYOUTS[layout].get("fsdp_size", 4)


@pytest.mark.parametrize("layout", ["2 micro-batches of 2 ranks", "2 replicas of two halves"])
def test_an_export_has_the_weights_of_all_ranks(layout: str, four: list[dict[str, Any]]) -> None:
    found = four[0][layout]["sliding window"]
    model = AutoModelForCausalLM.from_pretrained(found["path"].parent / "export")
    assert all(found["weights"][name].equal(param) for name, param in model.named_parameters())
