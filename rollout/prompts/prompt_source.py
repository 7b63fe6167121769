"""Prompts of a run in their order, which a resumed run continues exactly."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import DataError
from rollout.prompts.datasets import MISSING, DatasetSpec, drop_duplicates, drop_overlong, read_rows
from rollout.prompts.render_prompts import Tokenizer, render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.prompts.pass_rate_filter import PassRateFilter
    from rollout.types import Group, Prompt


_log = logging.getLogger(__name__)
_EVAL_SUBSET_SEED = 20_260_102


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """All usable prompts of a data set, in its order."""

    prompts: tuple[Prompt, ...]
    num_duplicates: int
    num_overlong: int
    """Dropped rows."""
    fingerprint: str
    """Changes with any id, token or answer, and with the order."""


def load_prompts(spec: DatasetSpec, tokenizer: Tokenizer) -> PromptSet:
    """Reads, renders and filters a data set. Raises DataError if it cannot be used as configured."""
    rows = read_rows(spec)
    if all(row.get(spec.answer_column) is MISSING for row in rows) and not spec.answer_required:
        _log.warning("data set %r has no column %r: every answer is empty", spec.path, spec.answer_column)
    if spec.reward_column and all(row.get(spec.reward_column) is MISSING for row in rows):
        if spec.reward_column_required:
            raise rows[0].lacks(spec.reward_column, "task.reward.column")
        text = "data set %r has no column %r: task.reward.name scores all its responses"
        _log.warning(text, spec.path, spec.reward_column)
    different = drop_duplicates(rows, spec) if spec.dedup else rows
    if num_duplicates := len(rows) - len(different):
        text = "data set %r: dropped %d of %d rows whose prompt and answer are those of an earlier row (task.dedup)"
        _log.warning(text, spec.path, num_duplicates, len(rows))
    kept = drop_overlong(render(different, spec=spec, tokenizer=tokenizer), spec)
    if num_overlong := len(different) - len(kept):
        text = "data set %r: dropped %d of %d prompts over task.max_prompt_tokens=%d"
        _log.warning(text, spec.path, num_overlong, len(different), spec.max_prompt_tokens)
    return PromptSet(
        prompts=kept, num_duplicates=num_duplicates, num_overlong=num_overlong, fingerprint=fingerprint(kept)
    )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of ids, tokens and answers in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.prompt_id, prompt.answer, len(prompt.token_ids)]).encode())
        digest.update(np.ascontiguousarray(prompt.token_ids, np.int32).tobytes())
    return digest.hexdigest()[:16]


def rewards_fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of the rewards that rows name, in order; "none" if none does."""
    if not any(prompt.reward for prompt in prompts):
        return "none"
    return hashlib.sha256(json.dumps([prompt.reward for prompt in prompts]).encode()).hexdigest()[:16]


def eval_subset(prompts: PromptSet, *, size: int) -> tuple[Prompt, ...]:
    """`size` prompts (0: all) from the whole set, the same in every run, so that evaluations of runs compare."""
    everything = prompts.prompts
    if size == 0 or size >= len(everything):
        return everything
    order = np.random.Generator(np.random.PCG64(_EVAL_SUBSET_SEED)).permutation(len(everything))
    return tuple(everything[i] for i in sorted(order[:size]))


class PromptSource:
    """An endless stream over a `PromptSet`: each epoch shows every prompt once, in an order given by (seed, epoch). A
    curriculum sorts epochs; a pass-rate filter skips prompts.

    Example:
        source = PromptSource(load_prompts(spec, tokenizer), seed=0, shuffle=True)
        source.next()
        state = source.state_dict()     # JSON-able
    """

    def __init__(
        self,
        prompts: PromptSet,
        *,
        seed: int,
        shuffle: bool,
        curriculum: Curriculum | None = None,
        pass_rates: PassRateFilter | None = None,
    ) -> None:
        if seed < 0:
            raise DataError(f"the seed of the prompt order must be >= 0, got {seed}; set seed")
        if not prompts.prompts:
            raise DataError("the prompt set is empty; give a data set with at least one usable prompt")
        self._set, self._seed, self._shuffle = prompts, seed, shuffle
        self._curriculum, self._pass_rates = curriculum, pass_rates
        self._rewards = rewards_fingerprint(prompts.prompts)
        self._index = {p.prompt_id: i for i, p in enumerate(prompts.prompts)}
        if len(self._index) != len(prompts.prompts):
            raise DataError("two prompts share one prompt_id; row ids must be unique within a data set")
        self._seek(0)

    @property
    def epoch(self) -> int:
        """Of the next prompt, from 0."""
        return self._epoch

    def next(self, version: int | None = None) -> Prompt:
        """The next prompt that the pass-rate filter does not skip. Raises NoProgress if it skips all.

        Args:
            version: the live policy version; groups of earlier ones count for the filter. None counts all groups.
        """
        if self._pass_rates is None:
            return self._advance()
        self._pass_rates.apply_results(version)
        while True:  # ends within three epochs: each turn that skips a prompt shortens its cooldown
            if self._position == 0 and (num_idle := self._pass_rates.skip_epochs()):
                self._seek(self._epoch + num_idle)
            prompt = self._advance()
            if not self._pass_rates.skips(prompt.prompt_id):
                return prompt

    def require_prompt(self) -> None:
        """Call it before a run, after its checkpoint is loaded. Raises DataError if the pass-rate filter leaves no
        prompt."""
        if self._pass_rates is not None:
            self._pass_rates.require_prompt()

    def observe(self, group: Group) -> None:
        """A group ended, whatever becomes of it."""
        if self._pass_rates is not None:
            self._pass_rates.observe(group)

    def record(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of the stream, and of the prompts of `groups`."""
        record: dict[str, float] = {"epoch": self._epoch}
        if self._curriculum is not None:
            difficulties = [self._curriculum.difficulties[self._index[g.prompt_id]] for g in groups]
            record["difficulty_mean"] = float(np.mean(difficulties))
        return record if self._pass_rates is None else record | self._pass_rates.record()

    def _advance(self) -> Prompt:
        prompt = self._set.prompts[self._order[self._position]]
        self._position += 1
        if self._position == len(self._order):
            self._seek(self._epoch + 1)
        return prompt

    def _seek(self, epoch: int, position: int = 0) -> None:
        self._epoch, self._position, self._order = epoch, position, self._order_of(epoch)

    def find(self, prompt_id: str) -> Prompt:
        """The prompt of that id, for a resumed run to admit again what was in flight. Raises DataError if there is
        none."""
        if prompt_id not in self._index:
            raise DataError(f"the data set has no prompt {prompt_id!r}; resume with the data set the run began with")
        return self._set.prompts[self._index[prompt_id]]

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream, and what determines its order."""
        state: dict[str, Any] = {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "num_prompts": len(self._order),
            "fingerprint": self._set.fingerprint,
            "rewards": self._rewards,
            "curriculum": "none" if self._curriculum is None else self._curriculum.fingerprint,
        }
        return state if self._pass_rates is None else {**state, "pass_rates": self._pass_rates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state` was taken. A filter that it lacks starts fresh.

        Raises:
            DataError: another data set, seed, shuffling or curriculum gives another order.
        """
        now = self.state_dict()
        state = {"curriculum": "none", "rewards": now["rewards"], **state}  # older ones lack them
        missing = sorted(now.keys() - {"pass_rates"} - state.keys())
        if missing:
            raise DataError(f"the saved prompt order lacks {', '.join(missing)}; the checkpoint is damaged or foreign")
        changed = [
            f"{key} was {state[key]}, now {now[key]}"
            for key in ("num_prompts", "fingerprint", "rewards", "seed", "shuffle", "curriculum")
            if state[key] != now[key]
        ]
        if changed:
            raise DataError(
                f"the prompt order cannot continue: {'; '.join(changed)}; resume with the data set, tokenizer, "
                "arguments and tools of the chat template, limits, curriculum and seed the run began with, or start a "
                "new run"
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < len(self._order):
            raise DataError(f"saved prompt order: position {position} is not within its {len(self._order)} prompts")
        self._seek(epoch, position)
        if self._pass_rates is not None and "pass_rates" in state:
            self._pass_rates.load_state_dict(state["pass_rates"])

    def _order_of(self, epoch: int) -> np.ndarray:
        num_prompts = len(self._set.prompts)
        order = np.arange(num_prompts)
        if self._shuffle:
            order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(num_prompts)
        return order if self._curriculum is None else self._curriculum.arrange(order, epoch=epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Sorts each of the first `num_epochs` epochs from easy to hard. Prompts of one difficulty keep their order, so
    that a column of a few levels gives shuffled blocks.

    Example:
        Curriculum(difficulties=np.array([3.0, 1.0, 2.0]), num_epochs=1).arrange(np.arange(3), epoch=0)  # 1, 2, 0
    """

    difficulties: np.ndarray
    """float64[prompts]: larger is harder."""
    num_epochs: int

    def arrange(self, order: np.ndarray, *, epoch: int) -> np.ndarray:
        """`order`: int[prompts], a permutation."""
        if epoch >= self.num_epochs:
            return order
        return order[np.argsort(self.difficulties[order], kind="stable")]

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes an order."""
        data = np.ascontiguousarray(self.difficulties, np.float64).tobytes() + str(self.num_epochs).encode()
        return hashlib.sha256(data).hexdigest()[:16]
