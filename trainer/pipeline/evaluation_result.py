"""What an evaluation found: its answers, and the numbers that follow from them. Pure functions over plain values."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trainer.pipeline.records import evaluation_numbers
from trainer.pipeline.state import Evaluation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import Prompt, Trajectory
    from trainer.config.schema.trainer import TrainerConfig
    from trainer.pipeline.held_out import HeldOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A held-out prompt with all answers to it, in order."""

    eval_set: str = ""
    """Name of its set; empty for that of `task.eval_path`."""
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
class Scored:
    """The numbers of one set."""

    summary: Evaluation
    breakdown: Breakdown

    def record(self, name: str) -> dict[str, object]:
        """Its metrics as one of `task.eval_sets`, `eval/NAME/...`; version and time are those of the evaluation."""
        whole = {"eval/version", "eval/time_s"}
        numbers = {**self.summary.record(), **self.breakdown.record()}
        return {f"eval/{name}/{key.removeprefix('eval/')}": value for key, value in numbers.items() if key not in whole}

    def line(self) -> dict[str, object]:
        """Its part of a line of evaluations.jsonl."""
        return {**evaluation_numbers(self.summary), **self.breakdown.line()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation that has a number, and the answers that it is the number of."""

    summary: Evaluation
    """Of the set of `task.eval_path`, as `breakdown`."""
    breakdown: Breakdown
    sets: Mapping[str, Scored] = field(default_factory=dict)
    """Those of `task.eval_sets`, by name."""
    answers: Sequence[Answered]
    """Of all sets."""

    def record(self) -> dict[str, object]:
        """Metrics beside those of `summary`."""
        of_sets = {key: value for name, one in self.sets.items() for key, value in one.record(name).items()}
        return {**self.breakdown.record(), **of_sets}

    def line(self) -> dict[str, object]:
        """The part of a line of evaluations.jsonl that `summary` does not give; `sets` only where there are any."""
        of_sets = {"sets": {name: one.line() for name, one in self.sets.items()}} if self.sets else {}
        return {**self.breakdown.line(), **of_sets}


def by_prompt(held_out: Sequence[HeldOut], trajectories: Sequence[Trajectory]) -> list[Answered]:
    """In the order of the sets and their prompts; answers to one prompt are in a row."""
    answers, every = list[Answered](), iter(trajectories)
    for one in held_out:
        for prompt in one.prompts:
            own = list(itertools.islice(every, one.num_samples))
            answers.append(Answered(eval_set=one.name, prompt=prompt, trajectories=own))
    return answers


def evaluated(
    answers: Sequence[Answered], cfg: TrainerConfig, *, reward: str, version: int, time_s: float
) -> Evaluated:
    """All that is told of them. `reward` judges the prompts that name none."""
    by_set: dict[str, list[Answered]] = {}
    for one in answers:
        by_set.setdefault(one.eval_set, []).append(one)
    scored = {
        name: Scored(
            summary=summarise(
                [trajectory for one in own for trajectory in one.trajectories],
                cfg,
                num_samples=len(own[0].trajectories),
                version=version,
                time_s=time_s,
            ),
            breakdown=break_down(own, reward=reward),
        )
        for name, own in by_set.items()
    }
    main = scored.pop("")
    return Evaluated(summary=main.summary, breakdown=main.breakdown, sets=scored, answers=answers)


def summarise(
    trajectories: Sequence[Trajectory], cfg: TrainerConfig, *, num_samples: int, version: int, time_s: float
) -> Evaluation:
    """Means over all answers of a set; those to one prompt are `num_samples` in a row. A truncated one counts as it was
    rewarded."""
    rewards = np.array([t.total_reward for t in trajectories], np.float64)
    passed_PS = (rewards >= cfg.eval_pass_reward).reshape(-1, num_samples)  # P prompts, S samples
    k = num_samples if cfg.eval_pass_k is None else cfg.eval_pass_k
    num_passed_P = passed_PS.sum(axis=1)
    return Evaluation(
        version=version,
        accuracy=float(np.mean(rewards)),
        num_prompts=len(num_passed_P),
        num_samples=num_samples,
        pass_at={k: float(np.mean([pass_at_k(num_samples, int(c), k) for c in num_passed_P])) for k in sorted({1, k})},
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
