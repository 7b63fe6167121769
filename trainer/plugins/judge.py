"""Calls a reward as a run does: in a process that is killed if a call takes too long."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np

from rollout.errors import RewardError
from rollout.reward.pipeline import RewardPipeline
from rollout.reward.registry import lookup
from rollout.types import Prompt
from trainer.plugins.contract import Broken

if TYPE_CHECKING:
    from types import TracebackType

    from rollout.reward.call import Item
    from rollout.reward.result import RewardResult

_WATCH = "trainer.plugins.metadata_watch:call_watched"
_PROMPT_ID = "trial"


class Judge:
    """One reward process, for code outside of any event loop; a context manager that leaves nothing behind.

    Example:
        with Judge("my_package.rewards.reward", timeout_s=10.0) as judge:
            require(reward_checks(judge, item=item))
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        """Starts nothing yet.

        Args:
            name: as in `task.reward.name`.
            timeout_s: of one call.

        Raises:
            DataError: there is no such reward.
        """
        self.timeout_s = timeout_s
        self._name, self._target = name, lookup(name).target
        self._pipeline = RewardPipeline(name, timeout_s=timeout_s, num_processes=1)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        """Raises DataError if the function does not import."""
        try:
            self._runner.run(self._pipeline.start())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def score(self, item: Item) -> RewardResult:
        """The reward of one response. Raises Broken if there is none: the function raised, hung, ended its process or
        returned something else."""
        return self._score(item, self._name)

    def check_metadata(self, item: Item) -> None:
        """Raises Broken if a call changes the metadata of its item, or fails."""
        self._score(replace(item, metadata={"target": self._target, "metadata": dict(item.metadata)}), _WATCH)

    def _score(self, item: Item, name: str) -> RewardResult:
        prompt = Prompt(
            prompt_id=_PROMPT_ID,
            token_ids=np.empty(0, np.int32),
            text=item.prompt,
            answer=item.answer,
            reward=name,
            metadata=item.metadata,
        )
        try:
            return self._runner.run(self._pipeline.score(prompt, item.response))
        except RewardError as error:
            reason = str(error).removeprefix(f"reward {name!r}, prompt {_PROMPT_ID!r}: ")
            raise Broken(f"response {item.response!r:.40}: {reason}") from error

    def _close(self) -> None:
        try:
            self._runner.run(self._pipeline.close())
        finally:
            self._runner.close()
