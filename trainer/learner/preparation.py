"""What a step needs before the policy's first backward: reference log-probs, values, and the advantages of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from trainer.learner.advantages import (
    normalized_over_ranks,
    penalized_advantages,
    penalized_rewards,
    reward_advantages,
)
from trainer.learner.errors import TrainingDiverged
from trainer.learner.values import ValueTotals

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch, StepRewards
    from trainer.learner.critic import Critic
    from trainer.learner.reference import Reference
    from trainer.learner.result import PhaseTimer
    from trainer.learner.values import ValueTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """One entry per micro-batch, where not said otherwise."""

    batches: tuple[MicroBatch, ...]
    """With final advantages."""
    references: tuple[np.ndarray | None, ...]
    """float32[T], log-probs of the reference; None where nothing needs them."""
    targets: tuple[ValueTargets, ...]
    """Empty without a critic."""
    totals: ValueTotals


class Preparation:
    """Reference and critic of a learner at work. Collective."""

    def __init__(
        self, cfg: RunConfig, *, reference: Reference | None, critic: Critic | None, device: torch.device
    ) -> None:
        self._cfg, self._reference, self._critic, self._device = cfg, reference, critic, device

    def prepare(
        self,
        micro_batches: Sequence[MicroBatch],
        rewards: StepRewards | None,
        *,
        trains_policy: bool,
        timer: PhaseTimer,
    ) -> PreparedStep:
        """Finish the advantages of a step, if they are not final; with a critic of its own, leave its gradients.

        Raises:
            TrainingDiverged: a log-prob of the reference or a value is not finite, on any rank; raised on all of them.
                A critic of its own holds gradients then.
            ValueError: the advantages are not final, and `rewards` or those of the tokens are missing.
        """
        references: tuple[np.ndarray | None, ...] = (None,) * len(micro_batches)
        if self._reference is not None and (trains_policy or self._cfg.algorithm.kl.in_reward):
            logprobs = [self._reference.logprobs(batch) for batch in micro_batches]
            named = self._cfg.algorithm.kl.path
            self._refuse_non_finite(logprobs, _BAD_REFERENCE.format(key="model.path" if named is None else _KL_PATH))
            references = tuple(logprobs)
            timer.mark("reference")
        totals = ValueTotals(num_loss_tokens=0 if rewards is None else rewards.num_loss_tokens)
        targets: tuple[ValueTargets, ...] = ()
        batches = tuple(micro_batches)
        if self._cfg.algorithm.finishes_on_ranks:
            if rewards is None:
                raise ValueError("the advantages of this step are not final, and it came without rewards; pass them")
            targets, advantages = self._finish(batches, references, rewards, totals)
            batches = tuple(
                replace(batch, advantages=advantages_T.astype(np.float32))
                for batch, advantages_T in zip(batches, advantages, strict=True)
            )
            timer.mark("advantages" if self._critic is None else "critic")
        if self._cfg.algorithm.kl.in_advantage:
            batches = tuple(map(self._less_kl, batches, references))
        return PreparedStep(batches=batches, references=references, targets=targets, totals=totals)

    def _less_kl(self, batch: MicroBatch, reference_T: np.ndarray | None) -> MicroBatch:
        if reference_T is None:  # the critic alone is trained
            return batch
        return replace(batch, advantages=penalized_advantages(batch, reference_T, config=self._cfg.algorithm.kl))

    def rehearse(self, batch: MicroBatch) -> None:
        """The passes of `prepare`, for what is done once. A critic of its own holds gradients then."""
        if self._reference is not None:
            self._reference.logprobs(batch)
        if self._critic is not None:
            rewards_T = np.zeros(len(batch.token_ids))
            self._critic.targets([batch], [rewards_T], totals=ValueTotals(num_loss_tokens=0))

    def _finish(
        self,
        batches: Sequence[MicroBatch],
        references: Sequence[np.ndarray | None],
        rewards: StepRewards,
        totals: ValueTotals,
    ) -> tuple[tuple[ValueTargets, ...], list[np.ndarray]]:
        """(targets, empty without a critic; advantages, float64[T] per micro-batch)."""
        config = self._cfg.algorithm
        penalized = [penalized_rewards(b, r, config=config.kl) for b, r in zip(batches, references, strict=True)]
        if self._critic is None:
            return (), reward_advantages(batches, penalized, step_rewards=rewards, config=config, device=self._device)
        targets = tuple(self._critic.targets(batches, penalized, totals=totals))
        self._refuse_non_finite([one.values_T for one in targets], _BAD_VALUES)
        advantages = [one.advantages_T for one in targets]
        if config.whiten_advantages:
            advantages = normalized_over_ranks(advantages, batches, device=self._device)
        return targets, advantages

    def _refuse_non_finite(self, arrays: Iterable[np.ndarray], told: str) -> None:
        """Raises TrainingDiverged on every rank if any of them has such a number: one that raised alone would leave the
        others waiting in their next collective."""
        found = float(sum(np.count_nonzero(~np.isfinite(array_T)) for array_T in arrays))
        count = torch.tensor(found, dtype=torch.float64, device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.SUM)
        if count > 0:
            raise TrainingDiverged(f"{int(count)} {told}; no weight was changed by this step")


_BAD_REFERENCE = (
    "log-probs of the reference (algorithm.kl) are not finite; its weights do not change in a run, so look at those of "
    "{key}, and try model.compute_dtype=float32"
)
_KL_PATH = "algorithm.kl.path"
_BAD_VALUES = "values of the critic are not finite; lower critic.lr or critic.max_grad_norm"
