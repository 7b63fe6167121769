"""What every reward function promises."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.plugins.contract import Broken, Check, on_every

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.reward.call import Item
    from trainer.plugins.judge import Judge


def reward_checks(judge: Judge, *, item: Item) -> list[Check]:
    """The contract of the judge's reward, tried on a right response and on empty, broken, long and foreign ones.

    Args:
        item: a prompt with its answer; its response is taken for a right one.
    """
    items = _items(item)

    def on_items(check: Callable[[Judge, Item], object]) -> Callable[[], None]:
        return on_every(items, check, judge)

    return [
        Check(
            promise=f"gives a finite number, or a dict of them with the key reward, within {judge.timeout_s:g} s",
            run=on_items(_score),
        ),
        Check(promise="every response has the same named parts", run=lambda: _parts(judge, items)),
        Check(promise="two calls give the same result", run=on_items(_deterministic)),
        Check(promise="leaves metadata alone", run=lambda: judge.check_metadata(item)),
        Check(promise="a right response gets at least as much as an empty one", run=lambda: _direction(judge, item)),
    ]


def _items(item: Item) -> list[Item]:
    """The right response, and what policies really write."""
    right = item.response
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
    return [replace(item, response=text) for text in responses]


def _score(judge: Judge, item: Item) -> None:
    judge.score(item)


def _parts(judge: Judge, items: Sequence[Item]) -> None:
    expected = sorted(judge.score(items[0]).parts)
    for item in items:
        names = sorted(judge.score(item).parts)
        if names != expected:
            raise Broken(f"response {item.response!r:.40} has the parts {names}, the right response {expected}")


def _deterministic(judge: Judge, item: Item) -> None:
    first, second = judge.score(item), judge.score(item)
    if first != second:
        raise Broken(f"response {item.response!r:.40} got {first}, and then {second}")


def _direction(judge: Judge, item: Item) -> None:
    right, empty = (judge.score(one).reward for one in (item, replace(item, response="")))
    if right < empty:
        raise Broken(f"the right response gets {right:g} and the empty one {empty:g}; check the sign, or --answer")
