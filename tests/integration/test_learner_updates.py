"""Several updates per batch, from groups of responses to weights: on one and two real ranks as in a plain loop in
float64, which knows nothing of packing, ranks or sharding."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rollout.types import Group, Trajectory
from tests.fakes.learner import VOCAB, RankPool, make_learner, save_tiny
from tests.fakes.patience import PATIENT_TEST_S
from tests.fakes.rewarded import all_weights, config
from tests.fakes.trajectories import make_turn
from trainer.config.algorithm import CorrectionConfig, MaskConfig
from trainer.data.build import build_train_batch
from trainer.learner.checkpoint import begin, commit

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch, TrainBatch

pytestmark = [pytest.mark.timeout(PATIENT_TEST_S), pytest.mark.usefixtures("one_rank")]
PASSES, MINI_BATCHES, STEPS = 2, 2, 2
GAMMA, LAMBDA, CLIP, VALUE_CLIP, TEMPERATURE = 0.9, 0.8, 0.1, 0.2, 0.8
CORRECTIONS = {
    "bypass": CorrectionConfig(),
    "decoupled": CorrectionConfig(objective="decoupled", mask=MaskConfig(upper=1.8)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("updates")
    save_tiny(path / "model")
    return path


def _config(directory: Path, name: str) -> RunConfig:
    cfg = config(
        directory / "model",
        critic={"lr": 3e-3, "value_clip": VALUE_CLIP, "weight_decay": 0.1, "max_grad_norm": 0.5},
        gae_gamma=GAMMA,
        gae_lambda=LAMBDA,
        clip_ratio_low=CLIP,
        clip_ratio_high=CLIP,
        loss_aggregation="seq_mean_token_mean",
        correction=CORRECTIONS[name],
    )
    # A large eps: with the usual one the first updates are signs, and would magnify rounding.
    learner = replace(cfg.learner, lr=3e-3, eps=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    learner = replace(learner, updates_per_batch=PASSES, num_mini_batches=MINI_BATCHES)
    return replace(cfg, learner=learner)


@functools.cache
def _groups(step: int) -> list[Group]:
    """Four groups of three responses; every log-prob is that of a policy near a uniform one."""
    rng = np.random.default_rng(step)
    groups = []
    for group in range(4):
        prompt = rng.integers(3, VOCAB, int(rng.integers(2, 6)))
        trajectories = []
        for sample in range(3):
            generated = rng.integers(3, VOCAB, int(rng.integers(2, 12)))
            logprobs = rng.normal(-4, 0.3, len(generated)).tolist()
            turn = make_turn(prompt, generated, [(step, len(generated))], logprobs=logprobs)
            trajectories.append(
                Trajectory.of_turns(
                    prompt_id=f"{group}", sample_index=sample, turns=(turn,), reward=float(rng.normal()),
                    reward_parts={}, status="completed", timings={},
                )
            )  # fmt: skip
        groups.append(Group(group_id=group, prompt_id=f"{group}", trajectories=tuple(trajectories), start_version=step))
    return groups


def _batch(cfg: RunConfig, step: int, *, num_ranks: int) -> TrainBatch:
    return build_train_batch(
        _groups(step),
        step=step,
        algorithm=cfg.algorithm,
        num_ranks=num_ranks,
        max_tokens_per_micro_batch=30,
        max_response_tokens=12,
        num_mini_batches=cfg.learner.num_mini_batches,
        updates_per_batch=cfg.learner.updates_per_batch,
        seed=cfg.seed,
    )


def _trained(directory: Path, name: str, *, resume_at: int | None = None) -> dict[str, Any]:
    """Weights after all steps; with `resume_at` by another learner from a checkpoint there."""
    cfg, rank, num_ranks = _config(directory, name), dist.get_rank(), dist.get_world_size()
    learner = make_learner(cfg)
    results = []
    for step in range(STEPS):
        if step == resume_at:
            tmp = begin(directory / f"{num_ranks} {name}", step)
            learner.save(tmp, step=step)
            learner = make_learner(cfg)
            assert learner.load(commit(tmp, {})) == step
        batch = _batch(cfg, step, num_ranks=num_ranks)
        given = {"updates": batch.updates, "group_rewards": batch.group_rewards, "version": step}
        results.append(learner.train_step(batch.micro_batches[rank], step=step, **given))
    metrics = [{key: metric.mean for key, metric in result.metrics.items()} for result in results]
    return {"weights": all_weights(learner), "metrics": metrics}


def _job(directory: Path) -> dict[str, Any]:
    return {name: _trained(directory, name) for name in CORRECTIONS}


@pytest.fixture(scope="module")
def two_ranks(pool: RankPool, directory: Path) -> list[dict[str, Any]]:
    return pool.run(_job, directory)


class PlainLoop:
    """PPO as in the papers: whole models in float64, one response at a time."""

    def __init__(self, directory: Path, name: str) -> None:
        def load() -> Any:
            model = AutoModelForCausalLM.from_pretrained(directory / "model", attn_implementation="eager")
            return model.double()

        self.is_decoupled = name == "decoupled"
        self.policy, self.backbone = load(), load()
        hidden = self.policy.config.hidden_size
        self.head = [torch.zeros(1, hidden, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
        critic = {f"hf.{n}": p for n, p in self.backbone.named_parameters() if p is not self.backbone.lm_head.weight}
        critic |= {"hf.model.embed_tokens.weight": self.backbone.model.embed_tokens.weight}
        critic |= {f"value_head.{n}": self.head[at].requires_grad_() for at, n in enumerate(("weight", "bias"))}
        self.params = {"": dict(self.policy.named_parameters()), "critic.": critic}
        self.optimizers = {prefix: self._adamw(list(params.values())) for prefix, params in self.params.items()}

    @staticmethod
    def _adamw(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=3e-3, eps=1e-2)

    def logprobs(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        logp = torch.log_softmax(self.policy(ids[None]).logits[0] / TEMPERATURE, -1)
        return logp[at - 1].gather(1, ids[at, None]).squeeze(1)

    def values(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        hidden = self.backbone.model(ids[None]).last_hidden_state[0][at - 1]
        return hidden @ self.head[0][0] + self.head[1]

    def step(self, batch: TrainBatch) -> None:
        of_batches = [_responses(micro) for micro in batch.micro_batches[0]]
        everything = [one for of_batch in of_batches for one in of_batch]
        with torch.no_grad():
            for one in everything:
                one["start"] = self.logprobs(one["ids"], one["at"])
                one["value"] = self.values(one["ids"], one["at"])
                one["advantage"], one["return"] = _slow_gae(one["rewards"], one["value"])
        flat = torch.cat([one["advantage"] for one in everything])
        for one in everything:
            one["advantage"] = (one["advantage"] - flat.mean()) / flat.std(correction=0)
        assert len(batch.updates) == PASSES * MINI_BATCHES
        for start, stop in batch.updates:
            self.update([one for of_batch in of_batches[start:stop] for one in of_batch])

    def update(self, mini_batch: list[dict[str, torch.Tensor]]) -> None:
        num_tokens = sum(len(one["at"]) for one in mini_batch)
        policy_loss = value_loss = torch.zeros((), dtype=torch.float64)
        for one in mini_batch:
            old, weight = one["engine"], torch.ones_like(one["engine"])
            if self.is_decoupled:
                old, weight = one["start"], (one["start"] - one["engine"]).exp()
                weight = torch.where(weight > 1.8, 0.0, weight)
            ratio, advantage = (self.logprobs(one["ids"], one["at"]) - old).exp(), one["advantage"]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            policy_loss = policy_loss - (weight * surrogate).mean() / len(mini_batch)
            value = self.values(one["ids"], one["at"])
            near = one["value"] + (value - one["value"]).clamp(-VALUE_CLIP, VALUE_CLIP)
            error = torch.maximum((value - one["return"]) ** 2, (near - one["return"]) ** 2)
            value_loss = value_loss + 0.5 * error.sum() / num_tokens
        for prefix, loss in {"": policy_loss, "critic.": value_loss}.items():
            self.optimizers[prefix].zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.params[prefix].values(), 0.5)
            self.optimizers[prefix].step()


def _responses(micro: MicroBatch) -> list[dict[str, torch.Tensor]]:
    found = []
    for start, stop in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
        at = np.flatnonzero(micro.loss_mask[start:stop])
        assert micro.token_rewards is not None
        arrays = {"engine": micro.behavior_logprobs, "rewards": micro.token_rewards}
        one = {name: torch.from_numpy(array[start:stop][at].astype(np.float64)) for name, array in arrays.items()}
        ids = torch.from_numpy(micro.token_ids[start:stop].astype(np.int64))
        found.append({**one, "ids": ids, "at": torch.from_numpy(at)})
    return found


def _slow_gae(rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    following = torch.cat([values[1:], torch.zeros(1, dtype=torch.float64)])
    errors, count = rewards + GAMMA * following - values, len(values)
    powers = (GAMMA * LAMBDA) ** torch.arange(count, dtype=torch.float64)
    advantages = torch.stack([(powers[: count - t] * errors[t:]).sum() for t in range(count)])
    return advantages, advantages + values


@pytest.mark.parametrize("name", CORRECTIONS)
def test_two_passes_over_two_mini_batches_are_those_of_a_plain_loop_in_float64(
    name: str, directory: Path, two_ranks: list[dict[str, Any]]
) -> None:
    loop = PlainLoop(directory, name)
    first = {f"{prefix}{n}": p.detach().clone() for prefix, params in loop.params.items() for n, p in params.items()}
    cfg = _config(directory, name)
    for step in range(STEPS):
        loop.step(_batch(cfg, step, num_ranks=1))
    expected = {f"{prefix}{n}": p.detach() for prefix, params in loop.params.items() for n, p in params.items()}
    one = _trained(directory, name)
    for found in (one, *(rank[name] for rank in two_ranks)):
        assert found["weights"].keys() == expected.keys()
        for key, tensor in expected.items():
            moved = tensor - first[key]
            error = (found["weights"][key].double() - tensor).norm() / moved.norm()
            assert error < 2e-3, f"{key}: {error:.1e} of its way"
    for found, of_one in zip(two_ranks[0][name]["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(of_one, rel=1e-3, abs=1e-5)
    if name == "decoupled":
        assert one["metrics"][1]["first_ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert one["metrics"][1]["ratio_max"] > 1.01


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_run_of_several_updates_resumes_with_the_same_bits(name: str, directory: Path) -> None:
    whole, resumed = _trained(directory, name), _trained(directory, name, resume_at=1)
    assert all(tensor.equal(resumed["weights"][key]) for key, tensor in whole["weights"].items())
    assert resumed["metrics"] == whole["metrics"]
