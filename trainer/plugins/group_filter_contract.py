"""What every filter of finished groups promises. Shape legend: `G` judged answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from rollout.types import Prompt
from trainer.algorithms.group_filter import FinishedGroup, GroupFilterError, checked_reason
from trainer.plugins.contract import Broken, Check, on_every

GroupFilterFn = Callable[[FinishedGroup], object]

MAX_CALL_S = 0.01
"""The filter runs in the driver's event loop, where nothing else goes on meanwhile."""
_NUM_TIMED = 3


def group_filter_checks(function: GroupFilterFn, *, metadata: Mapping[str, object] | None = None) -> list[Check]:
    """The contract of a filter; its numbers are bound already, e.g. with `functools.partial`.

    Args:
        metadata: further columns of the data set, if the filter reads any.
    """

    def fresh() -> list[FinishedGroup]:
        return _groups({} if metadata is None else metadata)

    def on_groups(check: Callable[[GroupFilterFn, FinishedGroup], object]) -> Callable[[], None]:
        return on_every(fresh(), check, function)  # groups of its own: an earlier check may have let them be changed

    return [
        Check(promise="gives None, or a reason that can name a metric", run=on_groups(_reason)),
        Check(promise="two calls give the same reason", run=on_groups(_repeatable)),
        Check(promise="leaves the group alone", run=on_groups(_untouched)),
        Check(promise="the order of answers does not matter", run=on_groups(_order)),
        Check(promise="lets some group in", run=lambda: _lets_in(function, fresh())),
        Check(promise=f"a call takes less than {MAX_CALL_S:g} s", run=on_groups(_time)),
    ]


def _groups(metadata: Mapping[str, object]) -> list[FinishedGroup]:
    """What comes back in runs: mixed, equal, graded, negative and lone rewards; short, long, empty answers."""
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4, [0.0, 0.2, 0.5, 1.0, 1.0], [-1.0, 2.5, -3.0], [1.0]]
    lengths = [[12, 40, 7, 90], [8000] * 4, [3, 0, 1, 2], [100, 200, 300, 400, 500], [1, 9, 5], [30]]
    return [
        FinishedGroup(
            prompt=Prompt(
                prompt_id=f"train/{i}",
                token_ids=np.array([1, 2, 3], np.int32),
                text="1+1=",
                answer="2",
                metadata=dict(metadata),
            ),
            rewards_G=np.array(rewards_G),
            lengths_G=np.array(lengths_G, np.int64),
            is_truncated_G=np.array(lengths_G) >= 8000,
            num_failed=i % 2,
        )
        for i, (rewards_G, lengths_G) in enumerate(zip(rewards, lengths, strict=True))
    ]


def _reason(function: GroupFilterFn, group: FinishedGroup) -> str:
    try:
        return checked_reason(function(group))
    except GroupFilterError as error:
        raise Broken(f"rewards {group.rewards_G.tolist()}: {error}") from error


def _repeatable(function: GroupFilterFn, group: FinishedGroup) -> None:
    first, second = _reason(function, group), _reason(function, group)
    if first != second:
        raise Broken(f"rewards {group.rewards_G.tolist()} got {first!r}, then {second!r}; keep no state between calls")


def _untouched(function: GroupFilterFn, group: FinishedGroup) -> None:
    before = repr(group)
    _reason(function, group)
    if repr(group) != before:
        raise Broken("an array of the group, or the metadata of its prompt, was changed in place; work on a copy")


def _order(function: GroupFilterFn, group: FinishedGroup) -> None:
    backwards = FinishedGroup(
        prompt=group.prompt,
        rewards_G=group.rewards_G[::-1].copy(),
        lengths_G=group.lengths_G[::-1].copy(),
        is_truncated_G=group.is_truncated_G[::-1].copy(),
        num_failed=group.num_failed,
    )
    forth, back = _reason(function, group), _reason(function, backwards)
    if forth != back:
        raise Broken(f"rewards {group.rewards_G.tolist()} got {forth!r}, and backwards {back!r}")


def _lets_in(function: GroupFilterFn, groups: list[FinishedGroup]) -> None:
    reasons = sorted({_reason(function, group) for group in groups})
    if "" not in reasons:
        raise Broken(f"every group was filtered ({', '.join(reasons)}), also one of unequal rewards; a run would end")


def _time(function: GroupFilterFn, group: FinishedGroup) -> None:
    took_s = min(_seconds_of_a_call(function, group) for _ in range(_NUM_TIMED))
    if took_s > MAX_CALL_S:
        raise Broken(f"rewards {group.rewards_G.tolist()} took {took_s:.3f} s; the run would stand still meanwhile")


def _seconds_of_a_call(function: GroupFilterFn, group: FinishedGroup) -> float:
    started = time.perf_counter()
    _reason(function, group)
    return time.perf_counter() - started
