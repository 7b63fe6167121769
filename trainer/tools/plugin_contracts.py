"""The contracts of a user's reward, group filter and advantage estimator, as checks that can be run."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from rollout.errors import RewardError
from rollout.reward.pool import RewardPool
from rollout.reward.registry import load, lookup
from rollout.types import Prompt
from trainer.algorithms.advantages import FloatArray, GroupRewards
from trainer.algorithms.group_filter import FinishedGroup, GroupFilterError, checked_reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.reward.call import RewardRequest, RewardResult
    from trainer.config.algorithm import EstimatorTraits


_NUM_FRAMES = 2


class ContractError(Exception):
    """The function breaks a rule of its contract; the message describes how."""


class Check(NamedTuple):
    rule: str
    run: Callable[[], object]
    """Raises ContractError, or whatever the function raises."""


def expect(is_kept: bool, message: str) -> None:
    """Raises ContractError if a rule is broken."""
    if not is_kept:
        raise ContractError(message)


def checks_of(function: object, rules: Mapping[str, tuple[Callable[..., object], Sequence[object]]]) -> list[Check]:
    """`rules`: rule -> what checks it, and the trials that it is called with after the function."""

    def on_all(check: Callable[..., object], trials: Sequence[object]) -> None:
        for trial in trials:
            check(function, trial)

    return [Check(rule, partial(on_all, check, trials)) for rule, (check, trials) in rules.items()]


def run_checks(checks: Sequence[Check]) -> Iterator[tuple[str, str]]:
    """(rule, why it is broken; empty if it is kept) of every check, each run when its turn comes."""
    for check in checks:
        yield check.rule, _reason(check)


def format_outcome(rule: str, reason: str) -> str:
    return f"FAIL  {rule}\n      {reason}" if reason else f"ok    {rule}"


def assert_contract(checks: Sequence[Check]) -> None:
    """For a test. Raises ContractError with every failure.

    Example:
        def test_my_loss_keeps_the_contract() -> None:
            assert_contract(loss_checks(my_loss))
    """
    failed = [format_outcome(rule, reason) for rule, reason in run_checks(checks) if reason]
    if failed:
        raise ContractError("\n".join([f"{len(failed)} of {len(checks)} checks failed:", *failed]))


def _reason(check: Check) -> str:
    try:
        check.run()
    except ContractError as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, sys.exit() included
        frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
        where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
        return f"raised {type(error).__name__}: {error} ({where})"
    return ""


_WATCH = "trainer.tools.plugin_contracts:call_watched"
_PROMPT_ID = "trial"


class RewardRunner:
    """One reward process, for code outside of any event loop; a context manager.

    Example:
        with RewardRunner("my_package.rewards.reward", timeout_s=10.0) as runner:
            assert_contract(reward_checks(runner, item=item))
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        """Starts nothing yet; `timeout_s` is of one call. Raises DataError if there is no such `task.reward.name`."""
        self.timeout_s = timeout_s
        self._name, self._target = name, lookup(name).target
        self._pipeline = RewardPool(name, timeout_s=timeout_s, num_processes=1)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        """Raises DataError if the function does not import."""
        try:
            self._runner.run(self._pipeline.start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._pipeline.close())
        finally:
            self._runner.close()

    def check_metadata(self, item: RewardRequest) -> None:
        """Raises ContractError if a call changes the metadata of its item."""
        self.score(replace(item, metadata={"target": self._target, "metadata": dict(item.metadata)}), name=_WATCH)

    def score(self, item: RewardRequest, *, name: str | None = None) -> RewardResult:
        """Raises ContractError if the function raised, hung, ended its process or returned no reward."""
        name = self._name if name is None else name
        prompt = Prompt(
            prompt_id=_PROMPT_ID, token_ids=np.empty(0, np.int32), text=item.prompt, answer=item.answer, reward=name,
            metadata=item.metadata,
        )  # fmt: skip
        try:
            return self._runner.run(self._pipeline.score(prompt, item.response))
        except RewardError as error:
            reason = str(error).removeprefix(f"reward {name!r}, prompt {_PROMPT_ID!r}: ")
            raise ContractError(f"response {item.response!r:.40}: {reason}") from error


def call_watched(*, prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """A reward that calls another one, `metadata["target"]`, with `metadata["metadata"]`. Raises RewardError if that
    changed it."""
    passed = metadata["metadata"]
    before = repr(passed)
    outcome = load(metadata["target"])(prompt=prompt, response=response, answer=answer, metadata=passed)
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)
    if repr(passed) != before:
        raise RewardError(f"metadata was {before:.80} and is {passed!r:.80}; work on a copy")
    return 0.0


def reward_checks(runner: RewardRunner, *, item: RewardRequest) -> list[Check]:
    """The contract of the runner's reward, tried on the response of `item`, which is taken for a right one, and on
    empty, broken, long and foreign ones."""
    items = _items(item)
    return checks_of(runner, {
        f"gives a finite number, or a dict of them with the key reward, within {runner.timeout_s:g} s":
            (RewardRunner.score, items),
        "every response has the same named parts": (_parts, [items]),
        "two calls give the same result": (_deterministic, items),
        "leaves metadata alone": (RewardRunner.check_metadata, [item]),
        "a right response gets at least as much as an empty one": (_direction, [item]),
    })  # fmt: skip


def _items(item: RewardRequest) -> list[RewardRequest]:
    """The right response, and what policies really write."""
    right = item.response
    others = (f" {right}\n", "", " ", "?", f"{right} {right}", "\\boxed{", "x" * 20_000, "\u4f60\u597d \ud83d\ude00")
    return [replace(item, response=text) for text in (right, *others)]


def _parts(runner: RewardRunner, items: Sequence[RewardRequest]) -> None:
    expected = sorted(runner.score(items[0]).parts)
    for item in items:
        names = sorted(runner.score(item).parts)
        message = f"response {item.response!r:.40} has the parts {names}, the right response {expected}"
        expect(names == expected, message)


def _deterministic(runner: RewardRunner, item: RewardRequest) -> None:
    first, second = runner.score(item), runner.score(item)
    expect(first == second, f"response {item.response!r:.40} got {first}, and then {second}")


def _direction(runner: RewardRunner, item: RewardRequest) -> None:
    right, empty = (runner.score(one).reward for one in (item, replace(item, response="")))
    message = f"the right response gets {right:g} and the empty one {empty:g}; check the sign, or --answer"
    expect(right >= empty, message)


GroupFilterFn = Callable[[FinishedGroup], object]

MAX_CALL_S = 0.01
"""The filter runs in the driver's event loop, where nothing else runs meanwhile."""
_NUM_TIMED = 3


def group_filter_checks(function: GroupFilterFn, *, metadata: Mapping[str, object] | None = None) -> list[Check]:
    """The contract of a filter whose numbers are bound. `metadata`: further columns of the data set that it reads."""

    def fresh() -> list[FinishedGroup]:  # the function may change those of an earlier check
        return _groups({} if metadata is None else metadata)

    return checks_of(function, {
        "gives None, or a reason that can name a metric": (_reason_given, fresh()),
        "two calls give the same reason": (_repeatable, fresh()),
        "leaves the group alone": (_untouched, fresh()),
        "the order of responses does not matter": (_order, fresh()),
        "lets some group in": (_lets_in, [fresh()]),
        f"a call takes less than {MAX_CALL_S:g} s": (_time, fresh()),
    })  # fmt: skip


def _groups(metadata: Mapping[str, object]) -> list[FinishedGroup]:
    """What comes back in runs: mixed, equal, graded, negative and lone rewards; short, long, empty responses."""
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4, [0.0, 0.2, 0.5, 1.0, 1.0], [-1.0, 2.5, -3.0], [1.0]]
    prompt = Prompt(prompt_id="", token_ids=np.array([1, 2, 3], np.int32), text="1+1=", answer="2")
    lengths = [[12, 40, 7, 90], [8000] * 4, [3, 0, 1, 2], [100, 200, 300, 400, 500], [1, 9, 5], [30]]
    return [
        FinishedGroup(
            prompt=replace(prompt, prompt_id=f"train/{i}", metadata=dict(metadata)),
            rewards_G=np.array(rewards_G),
            lengths_G=np.array(lengths_G, np.int64),
            is_truncated_G=np.array(lengths_G) >= 8000,
            num_failed=i % 2,
        )
        for i, (rewards_G, lengths_G) in enumerate(zip(rewards, lengths, strict=True))
    ]


def _reason_given(function: GroupFilterFn, group: FinishedGroup) -> str:
    try:
        return checked_reason(function(group))
    except GroupFilterError as error:
        raise ContractError(f"rewards {group.rewards_G.tolist()}: {error}") from error


def _repeatable(function: GroupFilterFn, group: FinishedGroup) -> None:
    first, second = _reason_given(function, group), _reason_given(function, group)
    message = f"rewards {group.rewards_G.tolist()} got {first!r}, then {second!r}; keep no state between calls"
    expect(first == second, message)


def _untouched(function: GroupFilterFn, group: FinishedGroup) -> None:
    before = repr(group)
    _reason_given(function, group)
    message = "an array of the group, or the metadata of its prompt, was changed in place; work on a copy"
    expect(repr(group) == before, message)


def _order(function: GroupFilterFn, group: FinishedGroup) -> None:
    backwards = replace(
        group,
        rewards_G=group.rewards_G[::-1].copy(),
        lengths_G=group.lengths_G[::-1].copy(),
        is_truncated_G=group.is_truncated_G[::-1].copy(),
    )
    forth, back = _reason_given(function, group), _reason_given(function, backwards)
    expect(forth == back, f"rewards {group.rewards_G.tolist()} got {forth!r}, and backwards {back!r}")


def _lets_in(function: GroupFilterFn, groups: list[FinishedGroup]) -> None:
    reasons = sorted({_reason_given(function, group) for group in groups})
    message = f"every group was filtered ({', '.join(reasons)}), also one of unequal rewards; a run would end"
    expect("" in reasons, message)


def _time(function: GroupFilterFn, group: FinishedGroup) -> None:
    def seconds() -> float:
        started = time.perf_counter()
        _reason_given(function, group)
        return time.perf_counter() - started

    took_s = min(seconds() for _ in range(_NUM_TIMED))
    message = f"rewards {group.rewards_G.tolist()} took {took_s:.3f} s, during which the run would stall"
    expect(took_s <= MAX_CALL_S, message)


EstimatorFn = Callable[[Sequence[GroupRewards]], Sequence[FloatArray]]

_PARTS = ("correct", "format")
_SIZES = (4, 2, 7, 3)


def advantage_checks(estimator: EstimatorFn, *, traits: EstimatorTraits) -> list[Check]:
    """The contract of an estimator whose numbers are bound. `traits`: what it declares, `OWN_TRAITS` if nothing."""
    trial = _EstimatorTrial(estimator=estimator, traits=traits)
    return [
        Check("gives one float per response, in a list of one array per group", trial.form),
        Check("advantages are finite, also where all rewards are equal", trial.finite),
        Check("two calls give the same bits and leave the groups alone", trial.repeatable),
        Check("the order of responses in a group does not matter", trial.order_of_responses),
        Check("the order of groups does not matter", trial.order_of_groups),
        Check("other groups do not matter, unless it declares spans_step", trial.independence),
        Check("a better response of a group never gets less than a worse one", trial.direction),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _EstimatorTrial:
    estimator: EstimatorFn
    traits: EstimatorTraits

    def form(self) -> None:
        self._call(self._groups(0))

    def finite(self) -> None:
        sizes = _SIZES if self.traits.needs_peers else (1, *_SIZES)
        equal = [[np.full(n, value) for n in sizes] for value in (0.0, 1.0)]
        for rewards in [*equal, *(self._rewards(seed, sizes) for seed in range(3))]:
            for values_G, rewards_G in zip(self._call(self._of(rewards)), rewards, strict=True):
                message = f"{values_G.tolist()} for the rewards {rewards_G.tolist()}; guard the division"
                expect(bool(np.isfinite(values_G).all()), message)

    def repeatable(self) -> None:
        groups = self._groups(1)
        before = [group.rewards_G.copy() for group in groups]
        first, second = self._call(groups), self._call(groups)
        after = [group.rewards_G for group in groups]
        message = "the second call gave other numbers; use no randomness and keep no state between calls"
        expect(all(map(np.array_equal, first, second)), message)
        expect(all(map(np.array_equal, before, after)), "rewards_G was changed in place; work on a copy")

    def order_of_responses(self) -> None:
        groups, rng = self._groups(2), np.random.default_rng(2)
        orders = [rng.permutation(group.rewards_G.size) for group in groups]
        shuffled = [_reordered(group, order) for group, order in zip(groups, orders, strict=True)]
        expected = [values_G[order] for values_G, order in zip(self._call(groups), orders, strict=True)]
        _expect_equal(self._call(shuffled), expected, "after reordering its responses")

    def order_of_groups(self) -> None:
        groups = self._groups(3)
        _expect_equal(self._call(groups[::-1])[::-1], self._call(groups), "after reordering the groups")

    def independence(self) -> None:
        groups = self._groups(4)
        if not self.traits.spans_step:
            alone = [self._call([group])[0] for group in groups]
            _expect_equal(alone, self._call(groups), "without the other groups (declare spans_step if that is meant)")

    def direction(self) -> None:
        """Responses of equal length, graded: a better one may not get less, and somewhere gets more."""
        rewards = [np.array([1.0, 0.4, 0.0]), np.array([0.0, 1.0, 0.7, 0.7]), np.array([1.0, 0.0])]
        gaps: list[float] = []
        for values_G, rewards_G in zip(self._call(self._of(rewards)), rewards, strict=True):
            sorted_G = values_G[np.argsort(rewards_G, kind="stable")]
            falls_G = np.diff(sorted_G)[np.diff(np.sort(rewards_G)) > 0] < -1e-9
            message = f"{values_G.round(4).tolist()} for the rewards {rewards_G.tolist()}; check the sign"
            expect(not falls_G.any(), message)
            gaps.append(sorted_G[-1] - sorted_G[0])
        expect(max(gaps) > 1e-9, "the best response never gets more than the worst one, so nothing is learned")

    def _groups(self, seed: int) -> list[GroupRewards]:
        return self._of(self._rewards(seed, _SIZES))

    def _rewards(self, seed: int, sizes: Sequence[int]) -> list[FloatArray]:
        rng = np.random.default_rng(seed)
        return [rng.normal(size=n) if i % 2 else rng.integers(0, 2, n).astype(np.float64) for i, n in enumerate(sizes)]

    def _of(self, rewards: Sequence[FloatArray]) -> list[GroupRewards]:
        """Of equal lengths, with parts that rank the responses as their total does."""
        return [
            GroupRewards(
                rewards_G=rewards_G.copy(),
                lengths_G=np.full(rewards_G.size, 5 + i),
                parts_G={name: rewards_G / len(_PARTS) for name in _PARTS} if self.traits.uses_parts else {},
                baseline=0.25 if self.traits.greedy_baseline else None,
            )
            for i, rewards_G in enumerate(rewards)
        ]

    def _call(self, groups: Sequence[GroupRewards]) -> list[FloatArray]:
        """The advantages, after their form was checked."""
        given = self.estimator(groups)
        if not isinstance(given, Sequence) or len(given) != len(groups):
            what = f"{len(given)} of them" if isinstance(given, Sequence) else f"a {type(given).__name__}"
            raise ContractError(f"expected a list of one array for each of {len(groups)} groups, got {what}")
        found = [np.asarray(values_G, np.float64) for values_G in given]
        for values_G, group in zip(found, groups, strict=True):
            shape = group.rewards_G.shape
            message = f"expected shape {shape}, one advantage per response, got {values_G.shape}"
            expect(values_G.shape == shape, message)
        return found


def _reordered(group: GroupRewards, order: np.ndarray) -> GroupRewards:
    return replace(
        group,
        rewards_G=group.rewards_G[order],
        lengths_G=group.lengths_G[order],
        parts_G={name: values_G[order] for name, values_G in group.parts_G.items()},
    )


def _expect_equal(got: Sequence[FloatArray], expected: Sequence[FloatArray], when: str) -> None:
    for i, (values_G, expected_G) in enumerate(zip(got, expected, strict=True)):
        message = f"group {i} gets {values_G.round(4).tolist()} {when}, and {expected_G.round(4).tolist()} before"
        expect(np.allclose(values_G, expected_G, rtol=1e-9, atol=1e-9), message)
