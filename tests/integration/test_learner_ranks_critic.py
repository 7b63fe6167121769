"""Critic, reference and advantages that are finished on the ranks: one and two real ranks (processes with gloo)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.fakes.learner import make_learner, process_group, reference_logprobs, run_ranks, save_tiny
from tests.fakes.patience import PATIENT_TEST_S
from tests.fakes.rewarded import all_gradients, all_weights, config, filler, pack_rewarded, rewarded
from trainer.learner.checkpoint import begin

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.policy import PolicyTrainer

pytestmark = pytest.mark.timeout(PATIENT_TEST_S)

TEACHER = "teacher"
IN_REWARD = {"coef": 0.3, "placement": "reward"}
IN_ADVANTAGE = {"coef": 0.3, "placement": "advantage", "estimator": "k1", "path": TEACHER}
CASES: dict[str, dict[str, Any]] = {
    "own critic, KL in the reward": {"gae_gamma": 0.9, "gae_lambda": 0.8, "kl": IN_REWARD},
    "own critic with warm-up, two updates": {
        "critic": {"warmup_steps": 1, "updates_per_step": 2, "value_clip": 0.1},
        "kl": IN_REWARD,
    },
    "shared critic, KL in the loss": {"critic": {"shared_backbone": True}, "kl": {"coef": 0.3, "placement": "loss"}},
    "grpo, KL in the reward": {"advantage": "grpo", "kl": IN_REWARD},
    "reinforce_pp, KL in the reward": {"advantage": "reinforce_pp", "kl": IN_REWARD},
    "own critic, KL to a teacher in the advantage": {"kl": IN_ADVANTAGE},
    "a teacher alone": {"advantage": "zero", "loss": "importance_sampling", "kl": IN_ADVANTAGE},
    "a teacher in the loss": {"advantage": "grpo", "kl": {"coef": 0.3, "placement": "loss", "path": TEACHER}},
}
STEPS = 3


def _config(directory: Path, name: str) -> RunConfig:
    kl = CASES[name]["kl"]
    path = str(directory / TEACHER) if _is_taught(name) else None
    return config(directory / "model", **CASES[name] | {"kl": kl | {"path": path}})


def _is_taught(name: str) -> bool:
    return "path" in CASES[name]["kl"]


def _share(parts: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of this rank: an uneven split, with a filler."""
    if dist.get_world_size() == 1:
        return [pack_rewarded(parts)]
    split = ([pack_rewarded(parts[:1]), pack_rewarded(parts[1:4])], [pack_rewarded(parts[4:]), filler()])
    return split[dist.get_rank()]


def _train(learner: PolicyTrainer, first: int, num_steps: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step in range(first, first + num_steps):
        parts, step_rewards = rewarded(8, seed=step)
        result = learner.train_step(_share(parts), step=step, **step_rewards)
        metrics = {name: metric.mean for name, metric in result.metrics.items()}
    return metrics


def _work(directory: Path, name: str) -> dict[str, Any]:
    """Train, look at everything, and go on."""
    learner = make_learner(_config(directory, name))
    whole = pack_rewarded(rewarded(8, seed=99)[0])
    initial = reference_logprobs(learner, whole) if _is_taught(name) else learner.logprobs(whole)
    metrics = _train(learner, 0, STEPS)
    found = {
        "metrics": metrics,
        "weights": all_weights(learner),
        "initial": initial,
        "current": learner.logprobs(whole),
        "reference": reference_logprobs(learner, whole),
    }
    path = directory / f"{dist.get_world_size()} {name.replace(',', '')}"
    if dist.get_rank() == 0:
        begin(path, STEPS)
    dist.barrier()
    learner.save(path / f"step_{STEPS}.tmp", step=STEPS)
    _train(learner, STEPS, 1)
    return found | {"path": path / f"step_{STEPS}.tmp", "later": all_weights(learner)}


def _resumed(directory: Path, name: str, path: Path) -> dict[str, Any]:
    learner = make_learner(_config(directory, name))
    assert learner.load(path) == STEPS
    parts, step_rewards = rewarded(8, seed=99)
    found: dict[str, Any] = {
        "weights": all_weights(learner),
        "reference": reference_logprobs(learner, pack_rewarded(parts)),
        "gradients": all_gradients(learner, _share(parts), step_rewards),
    }
    _train(learner, STEPS, 1)
    return found | {"later": all_weights(learner)}


def _job(directory: Path) -> dict[str, Any]:
    found = {name: _work(directory, name) for name in CASES}
    found["again"] = {name: _resumed(directory, name, found[name]["path"]) for name in CASES}
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_tiny(path / "model")
    save_tiny(path / TEACHER, "llama", seed=1)
    return path


@pytest.fixture(scope="module")
def two(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(_job, directory, world_size=2)


@pytest.fixture(scope="module")
def one(directory: Path, two: list[dict[str, Any]]) -> dict[str, Any]:
    with process_group(directory / "store_of_one"):
        found: dict[str, Any] = {name: _work(directory, name) for name in CASES}
        found["again"] = {name: _resumed(directory, name, two[0][name]["path"]) for name in CASES}
        return found


def _assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (got[name] - tensor).norm() / tensor.norm().clamp_min(1e-6)
        assert error <= rtol, f"{name}: relative error {error}"


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradients_and_metrics_of_one(
    name: str, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    expected = {key: value for key, value in one[name]["metrics"].items() if key != "num_tokens"}  # counts fillers
    for rank in two:
        # From the same bits of all weights, so that nothing but the split differs.
        _assert_close(rank["again"][name]["gradients"], one["again"][name]["gradients"], rtol=1e-5)
        _assert_close(rank[name]["weights"], one[name]["weights"], rtol=1e-4)
        got = {key: value for key, value in rank[name]["metrics"].items() if key != "num_tokens"}
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert two[0][name]["metrics"] == two[1][name]["metrics"]


@pytest.mark.parametrize("name", CASES)
def test_the_reference_stays_what_it_began_as(name: str, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for found in (one, *two):
        assert np.abs(found[name]["current"] - found[name]["initial"]).max() > 1e-3
        np.testing.assert_array_equal(found[name]["reference"], found[name]["initial"])
        np.testing.assert_array_equal(found["again"][name]["reference"], found[name]["initial"])


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_job_gives_the_bits_of_an_uninterrupted_one(name: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        for what in ("weights", "later"):
            assert all(tensor.equal(rank["again"][name][what][n]) for n, tensor in rank[name][what].items())


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_two_ranks_goes_on_with_one(name: str, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    resumed = one["again"][name]
    assert all(tensor.equal(resumed["weights"][n]) for n, tensor in two[0][name]["weights"].items())
    _assert_close(resumed["later"], two[0][name]["later"], rtol=1e-4)


def _go_on_from_one(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CASES:
        path = directory.parent / f"1 {name.replace(',', '')}" / f"step_{STEPS}.tmp"
        found[name] = _resumed(directory.parent, name, path)
    return found


@pytest.fixture(scope="module")
def two_from_one(directory: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    del one  # it wrote the checkpoints
    (directory / "from_one").mkdir()
    return run_ranks(_go_on_from_one, directory / "from_one", world_size=2)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_one_rank_goes_on_with_two(
    name: str, one: dict[str, Any], two_from_one: list[dict[str, Any]]
) -> None:
    for rank in two_from_one:
        assert all(tensor.equal(rank[name]["weights"][n]) for n, tensor in one[name]["weights"].items())
        _assert_close(rank[name]["later"], one[name]["later"], rtol=1e-4)
        np.testing.assert_array_equal(rank[name]["reference"], one[name]["reference"])
