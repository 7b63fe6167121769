"""What an evaluation found: its answers, and the numbers that follow from them. Pure functions over plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainer.pipeline.state import Evaluation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import Prompt, Trajectory
    from trainer.config.schema.trainer import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A held-out prompt with all answers to it, in order."""

    prompt: Prompt
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The held-out prompts that one reward judges."""

    accuracy: float
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What stands behind an accuracy: how sure it is, and what it is made of."""

    accuracy_stderr: float | None
    """None with one prompt, which says nothing of others."""
    reward_parts: Mapping[str, float]
    """Part -> mean over the answers that have it."""
    by_reward: Mapping[str, Share]
    """Name of a reward -> its prompts; empty where no prompt names one."""

    def record(self) -> dict[str, object]:
        """Its metrics. The name of a reward may be a path; as part of a metric's name it is one word."""
        stderr = {} if self.accuracy_stderr is None else {"eval/accuracy_stderr": self.accuracy_stderr}
        shares = {name.replace("/", "."): share for name, share in self.by_reward.items()}
        return {
            **stderr,
            **{f"eval/reward/part/{name}": mean for name, mean in self.reward_parts.items()},
            **{f"eval/accuracy/{name}": share.accuracy for name, share in shares.items()},
            **{f"eval/num_prompts/{name}": share.num_prompts for name, share in shares.items()},
        }

    def line(self) -> dict[str, object]:
        """Its part of a line of evaluations.jsonl."""
        return {
            "accuracy_stderr": self.accuracy_stderr,
            "reward_parts": self.reward_parts,
            "by_reward": self.by_reward,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation that has a number, and the answers that it is the number of."""

    summary: Evaluation
    breakdown: Breakdown
    answers: Sequence[Answered]


def by_prompt(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Answered]:
    """The same number of answers for each, in a row."""
    samples = len(trajectories) // len(prompts)
    return [
        Answered(prompt=prompt, trajectories=trajectories[first : first + samples])
        for prompt, first in zip(prompts, range(0, len(trajectories), samples), strict=True)
    ]


def evaluated(
    answers: Sequence[Answered], cfg: TrainerConfig, *, reward: str, version: int, time_s: float
) -> Evaluated:
    """All that is told of them. `reward` judges the prompts that name none."""
    trajectories = [trajectory for one in answers for trajectory in one.trajectories]
    return Evaluated(
        summary=summarise(trajectories, cfg, version=version, time_s=time_s),
        breakdown=break_down(answers, reward=reward),
        answers=answers,
    )


def summarise(trajectories: Sequence[Trajectory], cfg: TrainerConfig, *, version: int, time_s: float) -> Evaluation:
    """Means over all answers; those to one prompt are `cfg.eval_samples` in a row. A truncated one counts as it was
    rewarded."""
    samples = cfg.eval_samples
    rewards = np.array([t.total_reward for t in trajectories], np.float64)
    passed_PS = (rewards >= cfg.eval_pass_reward).reshape(-1, samples)  # P prompts, S samples
    k = samples if cfg.eval_pass_k is None else cfg.eval_pass_k
    num_passed_P = passed_PS.sum(axis=1)
    return Evaluation(
        version=version,
        accuracy=float(np.mean(rewards)),
        num_prompts=len(num_passed_P),
        num_samples=samples,
        pass_at={k: float(np.mean([pass_at_k(samples, int(c), k) for c in num_passed_P])) for k in sorted({1, k})},
        tokens_mean=float(np.mean([t.num_generated_tokens for t in trajectories])),
        truncated_frac=float(np.mean([t.status == "truncated" for t in trajectories])),
        time_s=time_s,
    )


def break_down(answers: Sequence[Answered], *, reward: str) -> Breakdown:
    """`reward` judges the prompts that name none. Parts are averaged as those of training are."""
    means_P = np.array([np.mean([t.total_reward for t in one.trajectories]) for one in answers], np.float64)
    parts: dict[str, list[float]] = {}
    for trajectory in (t for one in answers for t in one.trajectories):
        for name, value in trajectory.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return Breakdown(
        accuracy_stderr=standard_error(means_P),
        reward_parts={name: float(np.mean(parts[name])) for name in sorted(parts)},
        by_reward=_shares([one.prompt.reward or reward for one in answers], means_P)
        if any(one.prompt.reward for one in answers)
        else {},
    )


def _shares(rewards: Sequence[str], means_P: np.ndarray) -> dict[str, Share]:
    names = np.array(rewards)
    return {
        name: Share(accuracy=float(np.mean(means_P[names == name])), num_prompts=int(np.sum(names == name)))
        for name in sorted(set(rewards))
    }


def standard_error(means_P: np.ndarray) -> float | None:
    """Of the mean of the prompts' means; None for one prompt. Answers to one prompt share its difficulty, so they count
    as one observation (a cluster, as in Miller 2024, "Adding Error Bars to Evals")."""
    num_prompts = len(means_P)
    return None if num_prompts < 2 else float(np.std(means_P, ddof=1) / math.sqrt(num_prompts))


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate, from `num_samples` answers of which `num_passed` pass, that one of `k` answers passes:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).

    Raises:
        ValueError: k is not in [1, num_samples], or num_passed not in [0, num_samples].
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(
            f"pass@k needs 1 <= k <= samples and 0 <= passed <= samples, got k={k}, samples={num_samples}, "
            f"passed={num_passed}"
        )
    # Exact in integers, where a product of fractions rounds.
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
