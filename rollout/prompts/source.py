"""The stream of training prompts: loaded once, shuffled anew each epoch, resumable to the exact next prompt."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollout.errors import DataError
from rollout.prompts.filters import drop_overlong
from rollout.prompts.readers import SourceSpec, read_rows
from rollout.prompts.rendering import Tokenizer, has_column, render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import Prompt

_log = logging.getLogger(__name__)
_EVAL_SUBSET_SEED = 20_260_102


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """All usable prompts of a data set, in its own order."""

    prompts: tuple[Prompt, ...]
    num_overlong: int
    """Prompts that were dropped because they are too long."""
    fingerprint: str
    """Changes with any id, token or answer, and with the order."""


def load_prompts(spec: SourceSpec, tokenizer: Tokenizer) -> PromptSet:
    """Reads, renders and filters a data set.

    Raises:
        DataError: anything about the data set that keeps it from being used as configured.
    """
    rows = read_rows(spec)
    if not any(has_column(row, spec.answer_column) for row in rows) and not spec.answer_required:
        _log.warning("data set %r has no column %r: every answer is empty", spec.path, spec.answer_column)
    rendered = [render(row, spec=spec, tokenizer=tokenizer) for row in rows]
    kept, num_overlong = drop_overlong(rendered, max_prompt_tokens=spec.max_prompt_tokens, policy=spec.overlong_prompts)
    if num_overlong:
        _log.warning(
            "data set %r: dropped %d of %d prompts over task.max_prompt_tokens=%d",
            spec.path, num_overlong, len(rows), spec.max_prompt_tokens,
        )  # fmt: skip
    return PromptSet(prompts=kept, num_overlong=num_overlong, fingerprint=fingerprint(kept))


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of ids, tokens and answers in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.prompt_id, prompt.answer, len(prompt.token_ids)]).encode())
        digest.update(np.ascontiguousarray(prompt.token_ids, np.int32).tobytes())
    return digest.hexdigest()[:16]


def eval_subset(prompts: PromptSet, *, size: int) -> tuple[Prompt, ...]:
    """`size` prompts (0: all), the same ones in every run, so that evaluations can be compared between runs.

    They are drawn from the whole set: the first rows of a sorted file would not represent it.
    """
    everything = prompts.prompts
    if size == 0 or size >= len(everything):
        return everything
    order = np.random.Generator(np.random.PCG64(_EVAL_SUBSET_SEED)).permutation(len(everything))
    return tuple(everything[i] for i in sorted(order[:size]))


class PromptSource:
    """An endless stream over a `PromptSet`: each epoch shows every prompt once, in an order given by (seed, epoch).

    Example:
        source = PromptSource(load_prompts(spec, tokenizer), seed=0, shuffle=True)
        source.next()
        state = source.state_dict()     # JSON-able
    """

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool) -> None:
        if seed < 0:
            raise DataError(f"the seed of the prompt order must be >= 0, got {seed}; set seed")
        if not prompts.prompts:
            raise DataError("the prompt set is empty; give a data set with at least one usable prompt")
        self._set, self._seed, self._shuffle = prompts, seed, shuffle
        self._index = {p.prompt_id: p for p in prompts.prompts}
        if len(self._index) != len(prompts.prompts):
            raise DataError("two prompts share one prompt_id; row ids must be unique within a data set")
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The epoch of the prompt that comes next, from 0."""
        return self._epoch

    def next(self) -> Prompt:
        prompt = self._set.prompts[self._order[self._position]]
        self._position += 1
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return prompt

    def find(self, prompt_id: str) -> Prompt:
        """The prompt of that id: a resumed run uses it to admit again what was in flight.

        Raises:
            DataError: there is no such prompt.
        """
        if prompt_id not in self._index:
            raise DataError(f"the data set has no prompt {prompt_id!r}; resume with the data set the run began with")
        return self._index[prompt_id]

    def state_dict(self) -> dict[str, int | str]:
        """Where the stream stands, and what it streams."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "num_prompts": len(self._order),
            "fingerprint": self._set.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continues exactly where `state` was taken.

        Raises:
            DataError: the data set, the seed or the shuffling is another one, so the order would not continue.
        """
        now = self.state_dict()
        missing = sorted(now.keys() - state.keys())
        if missing:
            raise DataError(f"the saved prompt order lacks {', '.join(missing)}; the checkpoint is damaged or foreign")
        changed = [
            f"{key} was {state[key]}, now {now[key]}"
            for key in ("num_prompts", "fingerprint", "seed", "shuffle")
            if state[key] != now[key]
        ]
        if changed:
            raise DataError(
                f"the prompt order cannot continue: {'; '.join(changed)}; resume with the data set, tokenizer, limits "
                "and seed the run began with, or start a new run"
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < len(self._order):
            raise DataError(f"saved prompt order: position {position} is not within its {len(self._order)} prompts")
        self._epoch, self._position, self._order = epoch, position, self._order_of(epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        num_prompts = len(self._set.prompts)
        if not self._shuffle:
            return np.arange(num_prompts)
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(num_prompts)
