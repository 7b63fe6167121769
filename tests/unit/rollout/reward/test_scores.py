"""The rewards that come with Tandem, and how a user's own are found."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.errors import DataError, RewardError
from rollout.reward import registry
from rollout.reward.builtin import overlong_penalty
from rollout.reward.call import RewardRequest, RewardResult, call, to_result
from rollout.reward.math import score
from rollout.reward.pool import RewardPool, check_reward
from rollout.reward.registry import BUILTIN_REWARDS, load, lookup
from tests.unit.rollout.reward.scoring import ASYNC, PLAIN, a_prompt, outcome, outcomes

if TYPE_CHECKING:
    from pathlib import Path


def judged(response: str, answer: str) -> float:
    return score(prompt="", response=response, answer=answer, metadata={})


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"It is \boxed{42}.", "42", 1.0),
        (r"First \boxed{41}, no: \boxed{42}", "42", 1.0),
        (r"\boxed{42} is what I first thought, but \boxed{41}", "42", 0.0),
        (r"\boxed{1} and \boxed{2}", "1, 2", 1.0),
        (r"\boxed{1} and \boxed{3}", "1, 2", 0.0),
        ("so the answer is 42", "42", 1.0),
        ("17 apples and 25 pears make 42", "42", 1.0),
        ("42 apples, of which 25 are green", "42", 0.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"$x = \frac{2}{4}$", r"\frac12", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{(2, 1)}", "(1,2)", 0.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{72}", "She sold 48/2 = 24 clips.\n#### 72", 1.0),
        (r"\boxed{24}", "She sold 48/2 = 24 clips.\n#### 72", 0.0),
        (r"\boxed{42}", r"\boxed{42}", 1.0),
        (r"\boxed{-3}", "-3", 1.0),
        (r"\boxed{1267650600228229401496703205376}", "2^{100}", 1.0),
        (r"\boxed{10^{10}}", "10000000000", 1.0),
        (r"\boxed{20!}", "2432902008176640000", 1.0),
        (r"\boxed{3}", "-3", 0.0),
        (r"\boxed{50\%}", "50%", 1.0),
        (r"\boxed{50}", r"50\%", 1.0),
        (r"\boxed{0.5}", r"50\%", 1.0),
        (r"\boxed{12.5 \%}", r"\frac{1}{8}", 1.0),
        (r"\boxed{5}", r"50\%", 0.0),
        (r"\boxed{42.}", "42", 1.0),
        (r"\boxed{4.2}", "42", 0.0),
        ("<think>It may be 41.</think><answer>42</answer>", "42", 1.0),
        ("<think>It may be 42.</think><answer>41</answer>", "42", 0.0),
        ("The price <answer>1</answer>234", "1234", 0.0),
        (r"<answer>\boxed{42}</answer>", "42", 1.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        (r"\boxed{", "42", 0.0),
    ],
)
def test_math_compares_the_last_answer_as_mathematics(response: str, answer: str, expected: float) -> None:
    assert judged(response, answer) == expected


@pytest.mark.parametrize("answer", ["", "   ", "####"])
def test_math_refuses_an_answer_that_is_no_mathematics(answer: str) -> None:
    with pytest.raises(ValueError, match=r"task\.answer_column"):
        judged(r"\boxed{1}", answer)


async def test_math_gives_nothing_for_what_cannot_be_evaluated_and_refuses_such_a_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    math_reward = replace(registry.BUILTIN_REWARDS["math"], cpu_limit_s=0.3)
    monkeypatch.setattr(registry, "BUILTIN_REWARDS", {"math": math_reward})
    endless = [r"10^{10^{10}}", r"2^{2023^{2024}} \mod 7", r"\sum_{k=1}^{1000000}k^k"]
    async with RewardPool("math", timeout_s=60.0, num_processes=1) as rewards:
        assert await outcomes(rewards, [rf"\boxed{{{formula}}}" for formula in endless], answer="7") == [0.0] * 3
        assert await outcome(rewards, r"\boxed{7}", answer="7") == 1.0
        failure = str(await outcome(rewards, r"\boxed{7}", answer="9^{9^9}"))
        assert "'9^{9^9}' cannot be evaluated: it took longer than 0.3 s of processor time" in failure


async def test_a_call_that_takes_too_much_memory_fails_and_keeps_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.BUILTIN_REWARDS["math"].memory_limit_bytes == 2 << 30
    bounded = replace(registry.lookup(PLAIN), memory_limit_bytes=256 << 20)
    monkeypatch.setattr(registry, "BUILTIN_REWARDS", {"bounded": bounded})
    async with RewardPool("bounded", timeout_s=60.0, num_processes=1) as rewards:
        before = await outcome(rewards, "pid")
        assert "raised MemoryError" in str(await outcome(rewards, "allocate 512"))
        assert await outcomes(rewards, ["allocate 64", "pid"]) == [64.0, before]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (15_000, 0.0), (16_384, 0.0), (17_000, -0.150390625), (18_432, -0.5), (20_480, -1.0), (30_000, -1.0)],
)
def test_overlong_penalty_is_the_one_of_dapo(num_tokens: int, expected: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=20_480, buffer_tokens=4_096, penalty=1.0) == expected
    assert overlong_penalty(num_tokens, max_tokens=20_480, buffer_tokens=4_096, penalty=0.5) == expected / 2


def test_overlong_penalty_without_a_buffer_is_off_and_a_buffer_beyond_the_limit_is_refused() -> None:
    assert overlong_penalty(99, max_tokens=10, buffer_tokens=0, penalty=1.0) == 0.0
    with pytest.raises(ValueError, match="got 11"):
        overlong_penalty(5, max_tokens=10, buffer_tokens=11, penalty=1.0)


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1), Fraction(1), {"reward": np.float64(1)}],
)
def test_any_finite_real_number_is_a_reward(value: object) -> None:
    assert to_result(value) == RewardResult(reward=1.0)


@pytest.mark.parametrize(
    "value",
    ["1", None, np.array("1"), [1.0], 1j, math.nan, -math.inf, np.array([1.0]), {"reward": "1"},
     {"reward": 1, "part": math.nan}, {}],
)  # fmt: skip
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(RewardError, match="returned"):
        to_result(value)


# From a name to a function


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules that give 2.0."""
    good = "def reward(*, prompt, response, answer, metadata):\n    return 2.0\n"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    for file, source in {
        "mine.py": good,
        "installed/pkg_of_mine/scores.py": good,
        "other/mine.py": good.replace("2.0", "3.0"),
        "neighbours/json.py": "raise RuntimeError('shadowed')\n",
        "neighbours/neighbour_of_mine.py": "VALUE = 2.0\n",
        "neighbours/mine.py": "import importlib, json, neighbour_of_mine\nimportlib.reload(json)\n"
        + good.replace("2.0", "neighbour_of_mine.VALUE"),
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("mine.py:reward", "{folder}/mine.py:reward"),
        ("neighbours/mine.py:reward", "{folder}/neighbours/mine.py:reward"),
        ("pkg_of_mine.scores:reward", "pkg_of_mine.scores:reward"),
        ("pkg_of_mine.scores.reward", "pkg_of_mine.scores:reward"),
    ],
    ids=["a-relative-path-becomes-absolute", "a-file-imports-neighbours-and-shadows-nothing", "module", "dotted-path"],
)
def test_a_name_leads_to_its_function(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: str) -> None:
    entry = lookup(name)
    monkeypatch.chdir("/")
    assert (entry.target, entry.inline, entry.needs_answer) == (target.format(folder=folder), False, False)
    assert load(entry.target)(prompt="", response="", answer="", metadata={}) == 2.0


def test_two_files_of_one_name_stay_apart(folder: Path) -> None:
    functions = [load(f"{folder}/{path}:reward") for path in ("mine.py", "other/mine.py")]
    assert [function(prompt="", response="", answer="", metadata={}) for function in functions] == [2.0, 3.0]


@pytest.mark.parametrize(("name", "needs_answer"), [("arithmetic", True), ("math", True), ("zero", False)])
def test_builtin_rewards_give_full_marks_to_the_answer_itself(name: str, needs_answer: bool) -> None:
    assert lookup(name) is BUILTIN_REWARDS[name]
    assert lookup(name).needs_answer == needs_answer
    assert check_reward(name, sample=a_prompt(), timeout_s=30.0).reward == float(needs_answer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetik", "did you mean 'arithmetic'.*allowed: arithmetic, math, zero"),
        ("my_rewards.py", "allowed: arithmetic, math, zero, or your own function"),
        ("nowhere/mine.py:reward", "there is no file .*nowhere/mine.py"),
        ("mine.py:", "unknown reward"),
        (":reward", "unknown reward"),
    ],
)
def test_unknown_names_are_refused_with_what_is_allowed(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        lookup(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def rewards(*, prompt, response, answer, metadata): ...\n", "has no 'reward'; did you mean 'rewards'"),
        ("def reward(response): ...\n", "got an unexpected keyword argument 'prompt'.*its signature is"),
        ("def reward(*, prompt, response, answer, metadata, extra): ...\n", "missing a required .*'extra'"),
        ("async def reward(response): ...\n", "got an unexpected keyword argument 'prompt'.*its signature is"),
        ("reward = 3.0\n", "3.0 is not a callable object"),
        ("def reward(**_): raise ValueError('boom')", "raised ValueError: boom.*trial call with response='19'"),
        ("def reward(**_):\n    while True: pass", "longer than 1 s.*trial call with response='19'"),
        ("def reward(**_): return 'good'", "returned str 'good'.*trial call with response='19'"),
    ],
)
def test_functions_that_cannot_work_are_refused_before_the_run(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(DataError, match=f"(?s)mine.py:reward.*{message}"):
        check_reward(f"{tmp_path}/mine.py:reward", sample=a_prompt(), timeout_s=1.0)


def test_a_single_call_outside_of_a_run_waits_for_an_async_function() -> None:
    request = RewardRequest(prompt="", response="value 2", answer="", metadata={})
    assert call(load(ASYNC), request) == RewardResult(reward=2.0)
