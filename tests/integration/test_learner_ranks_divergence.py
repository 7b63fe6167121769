"""What is not finite on one rank stops both, in step and with the weights unchanged (processes with gloo)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from tests.fakes.learner import make_learner, run_ranks, save_tiny
from tests.fakes.rewarded import all_weights, config, pack_rewarded, rewarded
from trainer.errors import TrainingDiverged
from trainer.learner import critic, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainer.learner.policy import PolicyTrainer

IN_REWARD = {"coef": 0.3, "placement": "reward"}
IN_LOSS = {"coef": 0.3, "placement": "loss"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "own critic": ({}, "values of the critic"),
    "shared critic": ({"critic": {"shared_backbone": True}}, "values of the critic"),
    "reference, reward of answers": ({"advantage": "grpo", "kl": IN_REWARD}, "log-probs of the reference"),
    "reference, reward of tokens": ({"kl": IN_REWARD}, "log-probs of the reference"),
    "reference, loss": ({"advantage": "grpo", "kl": IN_LOSS}, "log-probs of the reference"),
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


def _job(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (keys, _) in CASES.items():
        learner = make_learner(config(directory / "model", **keys))
        parts, step_rewards = rewarded(8)
        mine = [pack_rewarded(parts[:3])] if dist.get_rank() == 0 else [pack_rewarded(parts[3:])]
        mine = [replace(batch, advantages=batch.loss_mask.astype(np.float32)) for batch in mine]
        before, told = all_weights(learner), "nothing was raised"
        try:
            with _poisoned(learner, name):
                learner.train_step(mine, step=0, **step_rewards)
        except TrainingDiverged as error:
            told = str(error)
        after = all_weights(learner)
        is_unchanged = all(tensor.equal(before[key]) for key, tensor in after.items())
        learner.train_step(mine, step=0, **step_rewards)  # neither rank is a collective behind the other
        found[name] = {"told": told, "is_unchanged": is_unchanged, "weights": all_weights(learner)}
        clean = make_learner(config(directory / "model", **keys))
        clean.train_step(mine, step=0, **step_rewards)
        found[name]["clean"] = all_weights(clean)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("divergence")
    save_tiny(path / "model")
    return run_ranks(_job, path, world_size=2)


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_raise_name_the_cause_and_could_go_on(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank[name]
        assert CASES[name][1] in found["told"] and "not finite" in found["told"]
        assert found["is_unchanged"]
        assert all(tensor.equal(found["weights"][key]) for key, tensor in found["clean"].items()), "no gradient is left"
    assert ranks[0][name]["told"] == ranks[1][name]["told"]
