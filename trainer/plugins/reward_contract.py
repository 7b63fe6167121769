"""What every reward function promises."""

from __future__ import annotations

import asyncio
import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.errors import RewardError
from rollout.reward.call import Item, call
from trainer.plugins.contract import Broken, Check, on_every

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.reward.registry import RewardFn
    from rollout.reward.result import RewardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrial:
    """What a reward is tried on: a prompt with its answer, and a limit for one call."""

    item: Item
    """Its response is taken for a right one."""
    timeout_s: float

    def items(self) -> list[Item]:
        """The right response, and what policies really write."""
        right, item = self.item.response, self.item
        responses = [
            right,
            f" {right}\n",
            "",
            " ",
            "?",
            right + " " + right,
            "\\boxed{",
            "x" * 20_000,
            "\u4f60\u597d \ud83d\ude00",
        ]
        return [
            Item(prompt=item.prompt, response=text, answer=item.answer, metadata=item.metadata) for text in responses
        ]


def reward_checks(reward: RewardFn, *, trial: RewardTrial) -> list[Check]:
    """The contract of a reward, tried on a right response and on empty, broken, long and foreign ones."""

    def on_items(check: Callable[[RewardFn, Item], object]) -> Callable[[], None]:
        return on_every(trial.items(), check, reward)

    return [
        Check(promise="gives a finite number, or a dict of them with the key reward", run=on_items(_result_of)),
        Check(promise="every response has the same named parts", run=lambda: _parts(reward, trial.items())),
        Check(promise="two calls give the same result", run=on_items(_deterministic)),
        Check(promise="leaves metadata alone", run=lambda: _metadata(reward, trial.item)),
        Check(promise="a right response gets at least as much as an empty one", run=lambda: _direction(reward, trial)),
        Check(promise=f"a call takes less than {trial.timeout_s:g} s", run=lambda: _time(reward, trial)),
    ]


def _result_of(reward: RewardFn, item: Item) -> RewardResult:
    result = call(reward, item)
    if isinstance(result, RewardError):
        raise Broken(f"response {item.response!r:.40}: {result}")
    return result


def _parts(reward: RewardFn, items: Sequence[Item]) -> None:
    expected = sorted(_result_of(reward, items[0]).parts)
    for item in items:
        names = sorted(_result_of(reward, item).parts)
        if names != expected:
            raise Broken(f"response {item.response!r:.40} has the parts {names}, the right response {expected}")


def _deterministic(reward: RewardFn, item: Item) -> None:
    first, second = _result_of(reward, item), _result_of(reward, item)
    if first != second:
        raise Broken(f"response {item.response!r:.40} got {first}, and then {second}")


def _metadata(reward: RewardFn, item: Item) -> None:
    metadata = dict(item.metadata)
    before = repr(metadata)
    outcome = reward(prompt=item.prompt, response=item.response, answer=item.answer, metadata=metadata)
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)
    if repr(metadata) != before:
        raise Broken(f"metadata was {before:.80} and is {metadata!r:.80}; work on a copy")


def _direction(reward: RewardFn, trial: RewardTrial) -> None:
    right, empty = (_result_of(reward, item).reward for item in (trial.items()[0], trial.items()[2]))
    if right < empty:
        raise Broken(f"the right response gets {right:g} and the empty one {empty:g}; check the sign, or --answer")


def _time(reward: RewardFn, trial: RewardTrial) -> None:
    for item in trial.items():
        started = time.perf_counter()
        _result_of(reward, item)
        took_s = time.perf_counter() - started
        if took_s > trial.timeout_s:
            raise Broken(f"response {item.response!r:.40} took {took_s:.2f} s; task.reward.timeout_s would end it")
