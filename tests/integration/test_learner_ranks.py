"""The learner on one and two real ranks (processes with gloo): gradients, metrics, checkpoints, losses, critics and
references do not depend on the number of ranks, and a number that is not finite on one rank stops both."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Qwen2Config

from tests.fakes.learner import (
    TINY,
    RankPool,
    assert_close,
    drawn_config,
    gradients,
    held_writes,
    logprobs,
    make_learner,
    pack,
    reference_logprobs,
    run_config,
    save_tiny,
    sequences,
    weights,
    without_loss,
)
from tests.fakes.patience import PATIENT_S, PATIENT_TEST_S
from tests.fakes.rewarded import all_weights, config, filler, rewarded
from trainer.config.algorithm import AlgorithmConfig, ClampConfig, CorrectionConfig, RejectConfig
from trainer.config.schema import LearnerConfig, RunConfig
from trainer.errors import CheckpointError, TrainingDiverged
from trainer.learner import critic, fit, optimizer, prepare
from trainer.learner.checkpoint import BackgroundSave, begin, commit, learner_state, load_sharded, read_state
from trainer.learner.optimizer import ShardedOptimizer
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainer.data.batch import MicroBatch
    from trainer.learner.policy import PolicyTrainer

pytestmark = [pytest.mark.timeout(PATIENT_TEST_S), pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_tiny(path / "model")
    save_tiny(path / TEACHER, "llama", seed=1)
    # 61 rows, 3 heads' worth of rows and one-row norms split unevenly over two ranks
    Qwen2Config(**TINY, architectures=["Qwen2ForCausalLM"]).save_pretrained(path / "hollow")
    return path


def _step(learner: PolicyTrainer) -> Any:
    """One step on the same sequences, however many ranks there are."""
    return learner.train_step([pack(sequences(8)[dist.get_rank() :: dist.get_world_size()])], step=0)


OBJECTIVES = {
    "gspo": AlgorithmConfig(loss="gspo", clip_ratio_low=0.1, clip_ratio_high=0.1),
    "gmpo with entropy bonus": AlgorithmConfig(loss="gmpo", clip_ratio_low=0.4, clip_ratio_high=0.4, entropy_coef=0.3),
    "decoupled with rejection": AlgorithmConfig(
        correction=CorrectionConfig(
            objective="decoupled", clamp=ClampConfig(upper=1.5), reject=RejectConfig(metric="k2", upper=0.8)
        )
    ),
}


def _loss_config(directory: Path, name: str) -> RunConfig:
    return replace(run_config(directory / "model"), algorithm=OBJECTIVES[name])


def _two_rank_job(directory: Path) -> dict[str, Any]:
    """What needs two ranks and no critic, in one start of processes."""
    rank = dist.get_rank()
    learner, parts = make_learner(run_config(directory / "model")), sequences(12)
    splits = {
        "halves": ([pack(parts[:6])], [pack(parts[6:])]),
        "uneven": (
            [pack(parts[:1]), pack(parts[1:3]), pack(parts[3:4])],
            [pack(parts[4:8]), pack(parts[8:]), without_loss()],
        ),
        "one rank idle": ([pack(parts)], [without_loss()]),
    }
    out: dict[str, Any] = {"splits": {name: gradients(learner, split[rank]) for name, split in splits.items()}}
    out["losses"] = {
        name: gradients(make_learner(_loss_config(directory, name)), splits["uneven"][rank]) for name in OBJECTIVES
    }
    out["logprobs"] = logprobs(learner, pack(parts))
    out["metrics"] = {k: m.mean for k, m in _step(learner).metrics.items()}
    out["random"] = weights(make_learner(drawn_config(directory / "hollow")))
    return out


@pytest.fixture(scope="module")
def two_ranks(pool: RankPool, directory: Path) -> list[dict[str, Any]]:
    return pool.run(_two_rank_job, directory)


def test_gradients_on_two_ranks_equal_those_on_one(directory: Path, two_ranks: list[dict[str, Any]]) -> None:
    whole = [pack(sequences(12))]
    expected = gradients(make_learner(run_config(directory / "model")), whole)
    of_losses = {name: gradients(make_learner(_loss_config(directory, name)), whole) for name in OBJECTIVES}
    for rank in two_ranks:
        for got in rank["splits"].values():
            assert_close(got, expected, rtol=1e-6)
        for name, got in rank["losses"].items():
            assert_close(got, of_losses[name], rtol=1e-5)


def test_metrics_and_logprobs_do_not_depend_on_the_number_of_ranks(
    directory: Path, two_ranks: list[dict[str, Any]]
) -> None:
    learner = make_learner(run_config(directory / "model"))
    torch.testing.assert_close(
        torch.from_numpy(two_ranks[1]["logprobs"]), torch.from_numpy(logprobs(learner, pack(sequences(12))))
    )
    expected = {k: m.mean for k, m in _step(learner).metrics.items()}
    assert two_ranks[0]["metrics"] == two_ranks[1]["metrics"]
    assert two_ranks[0]["metrics"] == pytest.approx(expected, rel=1e-5)
    assert expected["num_tokens"] == sum(len(p.token_ids) for p in sequences(8))


def test_random_initialisation_does_not_depend_on_the_number_of_ranks(
    directory: Path, two_ranks: list[dict[str, Any]]
) -> None:
    expected = weights(make_learner(drawn_config(directory / "hollow")))
    assert all(tensor.equal(expected[name]) for name, tensor in two_ranks[1]["random"].items())


def test_truncated_or_foreign_checkpoint_is_refused(directory: Path, tmp_path: Path) -> None:
    learner = make_learner(run_config(directory / "model"))
    tmp = begin(tmp_path, 1)
    learner.save(tmp, step=1)
    path = commit(tmp, {})
    other = make_learner(run_config(save_tiny(tmp_path / "other", "llama")))
    with pytest.raises(CheckpointError, match=r"model\.path is another model"):
        other.load(path)
    (shard,) = (path / "learner").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated"):
        read_state(path)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        learner.load(path)
    shard.unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        learner.load(path)


# Critics, references, and advantages that are finished on the ranks


TEACHER = "teacher"
IN_REWARD = {"coef": 0.3, "apply_to": "reward"}
IN_ADVANTAGE = {"coef": 0.3, "apply_to": "advantage", "estimator": "k1", "reference_model": TEACHER}
CRITIC_CASES: dict[str, dict[str, Any]] = {
    "own critic with warm-up, two updates, KL in the reward": {
        "critic": {"warmup_steps": 1, "updates_per_step": 2, "value_clip": 0.1},
        "gae_gamma": 0.9, "gae_lambda": 0.8, "kl": IN_REWARD,
    },
    "shared critic, KL in the loss": {"critic": {"shared_backbone": True}, "kl": {"coef": 0.3, "apply_to": "loss"}},
    "grpo, KL in the reward": {"advantage_estimator": "grpo", "kl": IN_REWARD},
    "reinforce_pp, KL in the reward": {"advantage_estimator": "reinforce_pp", "kl": IN_REWARD},
    "a teacher alone": {"advantage_estimator": "zero", "loss": "importance_sampling", "kl": IN_ADVANTAGE},
}  # fmt: skip
STEPS = 3


def _critic_config(directory: Path, name: str) -> RunConfig:
    kl = CRITIC_CASES[name]["kl"]
    path = str(directory / TEACHER) if _is_taught(name) else None
    return config(directory / "model", **CRITIC_CASES[name] | {"kl": kl | {"reference_model": path}})


def _is_taught(name: str) -> bool:
    return "reference_model" in CRITIC_CASES[name]["kl"]


def _share(parts: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of this rank: an uneven split, with a filler."""
    if dist.get_world_size() == 1:
        return [pack(parts)]
    split = ([pack(parts[:1]), pack(parts[1:4])], [pack(parts[4:]), filler()])
    return split[dist.get_rank()]


def _train(learner: PolicyTrainer, first: int, num_steps: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step in range(first, first + num_steps):
        parts, step_rewards = rewarded(8, seed=step)
        result = learner.train_step(_share(parts), step=step, **step_rewards)
        metrics = {name: metric.mean for name, metric in result.metrics.items()}
    return metrics


def _work(directory: Path, name: str) -> dict[str, Any]:
    """Train, look at everything, and continue."""
    learner = make_learner(_critic_config(directory, name))
    whole = pack(rewarded(8, seed=99)[0])
    initial = reference_logprobs(learner, whole) if _is_taught(name) else logprobs(learner, whole)
    metrics = _train(learner, 0, STEPS)
    found = {
        "metrics": metrics,
        "weights": all_weights(learner),
        "initial": initial,
        "current": logprobs(learner, whole),
        "reference": reference_logprobs(learner, whole),
    }
    path = directory / f"{dist.get_world_size()} {name.replace(',', '')}"
    if dist.get_rank() == 0:
        begin(path, STEPS)
    dist.barrier()
    with held_writes() as is_trained:
        learner.save(path / f"step_{STEPS}.tmp", step=STEPS, in_background=True)
        _train(learner, STEPS, 1)
        is_trained.set()
        learner.wait_saved()
    return found | {"path": path / f"step_{STEPS}.tmp", "later": all_weights(learner)}


def _resumed(directory: Path, name: str, path: Path) -> dict[str, Any]:
    learner = make_learner(_critic_config(directory, name))
    assert learner.load(path) == STEPS
    parts, step_rewards = rewarded(8, seed=99)
    found: dict[str, Any] = {
        "weights": all_weights(learner),
        "reference": reference_logprobs(learner, pack(parts)),
        "gradients": gradients(learner, _share(parts), **step_rewards),
    }
    _train(learner, STEPS, 1)
    return found | {"later": all_weights(learner)}


def _critic_job(directory: Path) -> dict[str, Any]:
    found = {name: _work(directory, name) for name in CRITIC_CASES}
    found["again"] = {name: _resumed(directory, name, found[name]["path"]) for name in CRITIC_CASES}
    return found


@pytest.fixture(scope="module")
def two(pool: RankPool, directory: Path) -> list[dict[str, Any]]:
    return pool.run(_critic_job, directory)


@pytest.fixture(scope="module")
def one(directory: Path, two: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: _work(directory, name) for name in CRITIC_CASES}
    found["again"] = {name: _resumed(directory, name, two[0][name]["path"]) for name in CRITIC_CASES}
    return found


@pytest.mark.parametrize("name", CRITIC_CASES)
def test_two_ranks_have_the_gradients_and_metrics_of_one(
    name: str, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    expected = {key: value for key, value in one[name]["metrics"].items() if key != "num_tokens"}  # counts fillers
    for rank in two:
        # From the same bits of all weights, so that nothing but the split differs.
        assert_close(rank["again"][name]["gradients"], one["again"][name]["gradients"], rtol=1e-5)
        assert_close(rank[name]["weights"], one[name]["weights"], rtol=1e-4)
        got = {key: value for key, value in rank[name]["metrics"].items() if key != "num_tokens"}
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert two[0][name]["metrics"] == two[1][name]["metrics"]


@pytest.mark.parametrize("name", CRITIC_CASES)
def test_the_reference_stays_what_it_began_as(name: str, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for found in (one, *two):
        assert np.abs(found[name]["current"] - found[name]["initial"]).max() > 1e-3
        np.testing.assert_array_equal(found[name]["reference"], found[name]["initial"])
        np.testing.assert_array_equal(found["again"][name]["reference"], found[name]["initial"])


@pytest.mark.parametrize("name", CRITIC_CASES)
def test_a_resumed_job_gives_the_bits_of_an_uninterrupted_one(name: str, two: list[dict[str, Any]]) -> None:
    """From a checkpoint that was written, in the background, after the step that followed it."""
    for rank in two:
        for what in ("weights", "later"):
            assert all(tensor.equal(rank["again"][name][what][n]) for n, tensor in rank[name][what].items())


@pytest.mark.parametrize("name", CRITIC_CASES)
def test_a_checkpoint_of_two_ranks_continues_on_one(name: str, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    resumed = one["again"][name]
    assert all(tensor.equal(resumed["weights"][n]) for n, tensor in two[0][name]["weights"].items())
    assert_close(resumed["later"], two[0][name]["later"], rtol=1e-4)


def _continue_from_one(directory: Path) -> dict[str, Any]:
    paths = {name: directory / f"1 {name.replace(',', '')}" / f"step_{STEPS}.tmp" for name in CRITIC_CASES}
    return {name: _resumed(directory, name, path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def two_from_one(pool: RankPool, directory: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    del one  # it wrote the checkpoints
    return pool.run(_continue_from_one, directory)


@pytest.mark.parametrize("name", CRITIC_CASES)
def test_a_checkpoint_of_one_rank_continues_on_two(
    name: str, one: dict[str, Any], two_from_one: list[dict[str, Any]]
) -> None:
    for rank in two_from_one:
        assert all(tensor.equal(rank[name]["weights"][n]) for n, tensor in one[name]["weights"].items())
        assert_close(rank[name]["later"], one[name]["later"], rtol=1e-4)
        np.testing.assert_array_equal(rank[name]["reference"], one[name]["reference"])


# Memory


class _Device:
    """A learner and its backend. Two bytes are needed per token of a rehearsal, in which ranks meet."""

    layout, torch_device = SimpleNamespace(shares_prefix=False), "accelerator"

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.rehearsed: list[int] = []

    def rehearse(self, batch: MicroBatch) -> None:
        dist.barrier()
        self.rehearsed.append(len(batch.token_ids))

    def take(self, _backend: object, num_bytes: int) -> None:
        if num_bytes > self.num_bytes:
            raise torch.OutOfMemoryError("another process has the rest")

    def max_memory_allocated(self) -> int:
        return 2 * self.rehearsed[-1]

    def memory_info(self) -> tuple[int, int]:
        return 0, 60_000

    def reset_peak_memory_stats(self) -> None: ...

    def release_cached(self) -> None: ...


def _fit_job(_directory: Path) -> tuple[tuple[int, bool], list[int]]:
    """Rank 1 has less memory than the share of it that a learner may have."""
    device: Any = _Device(40_000 if dist.get_rank() == 1 else 60_000)
    with patch.object(torch, "get_device_module", lambda _: device), patch.object(fit, "take_block", device.take):
        return fit.fit_micro_batch(device, RunConfig(), device, arena_bytes=0, earlier=None), device.rehearsed


def test_ranks_lower_the_tokens_together_where_one_of_them_lacks_memory(pool: RankPool, directory: Path) -> None:
    assert pool.run(_fit_job, directory) == [((12288, True), [2048, 4096, 12288])] * 2


# Optimizers

OPTIMIZERS = {
    "adamw_bf16": {"optimizer": "adamw_bf16"},
    "muon": {"optimizer": "muon"},
    "bfloat16 masters": {"master_dtype": "bfloat16"},
}
if importlib.util.find_spec("torchao") is not None:
    OPTIMIZERS["adamw_8bit"] = {"optimizer": "adamw_8bit"}
SHAPES = {
    "uneven": (37, 64),
    "tall": (130, 32),
    "short": (8, 64),
    "one row": (1, 64),
    "experts": (3, 32, 64),
    "vector": (33,),
}
"""By rows; one rank has none of one of them."""


def _optimizer(name: str) -> ShardedOptimizer:
    """After three updates with gradients that do not depend on the number of ranks."""
    generator, mesh = torch.Generator().manual_seed(0), init_device_mesh("cpu", (dist.get_world_size(),))
    dtype = torch.bfloat16 if "master" in name else torch.float32

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return distribute_tensor(torch.randn(shape, generator=generator).to(dtype), mesh, [Shard(0)])

    params = {key: torch.nn.Parameter(drawn(shape)) for key, shape in SHAPES.items()}
    learner = LearnerConfig(max_grad_norm=1e9, **OPTIMIZERS[name])
    with patch.object(optimizer, "MIN_QUANTIZED", 1):
        made = ShardedOptimizer(params, config=learner, matrices=["uneven", "tall", "short", "experts"])
    for _ in range(3):
        for slot in made._slots:
            slot.param.grad = drawn(SHAPES[slot.name])
            if dtype == torch.bfloat16:
                slot.add_grad(slot.param)  # as FSDP2 does
        made.step(lr=1e-2, grad_norm=0.0)
    return made


def _whole_state(made: ShardedOptimizer) -> dict[str, torch.Tensor]:
    return {name: one.full_tensor().clone() for name, one in (made.weights() | made.state()).items()}  # type: ignore[attr-defined]


def _optimizer_job(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in OPTIMIZERS:
        made, path = _optimizer(name), directory / name
        found[name] = _whole_state(made)
        path.mkdir(exist_ok=True)
        background = BackgroundSave(get_backend("cpu"), timeout_s=PATIENT_S)
        background.begin(path, learner_state({"": made}, step=3))
        background.wait()
    return found


@pytest.fixture(scope="module")
def two_optimizers(pool: RankPool, directory: Path) -> list[dict[str, dict[str, torch.Tensor]]]:
    return pool.run(_optimizer_job, directory)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_two_ranks_fits_one_bit_for_bit(
    name: str, directory: Path, two_optimizers: list[dict[str, dict[str, torch.Tensor]]]
) -> None:
    made, (expected, other) = _optimizer(name), [rank[name] for rank in two_optimizers]
    own = _whole_state(made)
    assert own.keys() == expected.keys() == other.keys()
    if name in ("adamw_8bit", "muon"):  # the others draw, each shard its own
        assert all(tensor.equal(own[key]) for key, tensor in expected.items())
    for tensor in (*made.weights().values(), *made.state().values()):
        tensor.to_local().zero_()  # type: ignore[attr-defined]
    made.set_num_updates(0)
    assert load_sharded(directory / name, {"": made}) == 3
    assert made.num_updates == 3
    assert all(tensor.equal(expected[key]) for key, tensor in _whole_state(made).items())


# What is not finite on one rank

IN_LOSS = {"coef": 0.3, "apply_to": "loss"}
BAD_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "own critic": ({}, "values of the critic"),
    "shared critic": ({"critic": {"shared_backbone": True}}, "values of the critic"),
    "reference, reward": ({"kl": IN_REWARD}, "log-probs of the reference"),
    "reference, loss": ({"advantage_estimator": "grpo", "kl": IN_LOSS}, "log-probs of the reference"),
}
BAD_RANK = 1


@contextlib.contextmanager
def _poisoned(learner: PolicyTrainer, name: str) -> Iterator[None]:
    """One rank's forward gives numbers that are not finite, as of a broken device."""
    if dist.get_rank() != BAD_RANK:
        yield
        return
    target, bad = (prepare, np.nan) if name.startswith("ref") else (critic, np.inf)
    original = target.scatter_to_tokens

    def broken(*args: Any) -> np.ndarray:
        return np.where(args[-1].loss_mask, np.float32(bad), original(*args))

    with patch.object(target, "scatter_to_tokens", broken):
        yield


def _divergence_job(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (keys, _) in BAD_CASES.items():
        learner = make_learner(config(directory / "model", **keys))
        parts, step_rewards = rewarded(8)
        mine = [pack(parts[:3])] if dist.get_rank() == 0 else [pack(parts[3:])]
        mine = [replace(batch, advantages=batch.loss_mask.astype(np.float32)) for batch in mine]
        before, error_text = all_weights(learner), "nothing was raised"
        try:
            with _poisoned(learner, name):
                learner.train_step(mine, step=0, **step_rewards)
        except TrainingDiverged as error:
            error_text = str(error)
        after = all_weights(learner)
        is_unchanged = all(tensor.equal(before[key]) for key, tensor in after.items())
        learner.train_step(mine, step=0, **step_rewards)  # neither rank is a collective ahead of the other
        found[name] = {"error": error_text, "is_unchanged": is_unchanged, "weights": all_weights(learner)}
        clean = make_learner(config(directory / "model", **keys))
        clean.train_step(mine, step=0, **step_rewards)
        found[name]["clean"] = all_weights(clean)
    return found


@pytest.fixture(scope="module")
def diverged(pool: RankPool, directory: Path) -> list[dict[str, Any]]:
    return pool.run(_divergence_job, directory)


@pytest.mark.parametrize("name", BAD_CASES)
def test_both_ranks_raise_with_the_cause_and_could_continue(name: str, diverged: list[dict[str, Any]]) -> None:
    for rank in diverged:
        found = rank[name]
        assert BAD_CASES[name][1] in found["error"] and "not finite" in found["error"]
        assert found["is_unchanged"]
        assert all(tensor.equal(found["weights"][key]) for key, tensor in found["clean"].items()), "no gradient is left"
    assert diverged[0][name]["error"] == diverged[1][name]["error"]
