"""A contract as a list of named checks, and the outcome of running them on one function."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_NUM_FRAMES = 2
_Function = TypeVar("_Function")
_Trial = TypeVar("_Trial")


class Broken(Exception):
    """A check found that the function does not keep its contract; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a function promises.

    Example:
        Check(promise="two calls give the same bits", run=lambda: compare(f(x), f(x)))
    """

    promise: str
    run: Callable[[], None]
    """Raises Broken, or whatever the function raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one check."""

    promise: str
    reason: str
    """Why it failed; empty if it passed."""

    def __str__(self) -> str:
        return f"FAIL  {self.promise}\n      {self.reason}" if self.reason else f"ok    {self.promise}"


def on_every(
    trials: Sequence[_Trial], check: Callable[[_Function, _Trial], object], function: _Function
) -> Callable[[], None]:
    """`check` on all trials, as what a `Check` runs."""

    def run() -> None:
        for trial in trials:
            check(function, trial)

    return run


def outcomes(checks: Sequence[Check]) -> Iterator[Outcome]:
    """Run every check, also after one has failed, when its outcome is asked for."""
    for check in checks:
        yield Outcome(promise=check.promise, reason=_reason(check))


def require(checks: Sequence[Check]) -> None:
    """For a test: run every check.

    Raises:
        Broken: with every failure.

    Example:
        def test_my_loss_keeps_the_contract() -> None:
            require(loss_checks(my_loss))
    """
    failed = [str(outcome) for outcome in outcomes(checks) if outcome.reason]
    if failed:
        raise Broken("\n".join([f"{len(failed)} of {len(checks)} checks failed:", *failed]))


def _reason(check: Check) -> str:
    try:
        check.run()
    except Broken as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, sys.exit() included
        frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
        where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
        return f"raised {type(error).__name__}: {error} ({where})"
    return ""
