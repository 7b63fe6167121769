"""The agent that calls tools, on an engine, against the chat template of the whole conversation."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.agent.runner import make_loop, run_episode
from rollout.agent.threads import AllThreadsHang, UserThreads, num_hanging
from rollout.agent.tools import Toolbox
from rollout.errors import PluginError
from rollout.types import Prompt, ToolUse
from tests.fakes.chat_policy import ChatPolicy, by_turn
from tests.fakes.chat_tokenizer import END, PLAIN, THINKING, chat_tokenizer
from tests.fakes.own_tokenizer import save_own_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rollout.types import Trajectory

TOOL_AGENT = "rollout.agent.tools.tool_agent"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer(PLAIN)


def call_of(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def agent_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """With the tool of the documentation."""
    text = (Path(__file__).parents[4] / "docs" / "agents.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def calculator" in block]
    (tmp_path / "tools_of_the_docs.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return {"tokenizer": str(tmp_path / "tokenizer"), "tools": ["tools_of_the_docs.calculator"]}


async def played(
    tokenizer: PreTrainedTokenizerFast, agent_args: dict[str, Any], *said: str, max_tokens: int = 800, **run: Any
) -> tuple[Trajectory, ChatPolicy]:
    """The policy says `said`, turn by turn."""
    policy = await ChatPolicy(by_turn(*said), tokenizer=tokenizer).start()
    loop: Any = make_loop(TOOL_AGENT, agent_args, **run)
    variables = run.get("chat_template_kwargs", {}) | ({"tools": loop.tools} if loop.tools else {})
    messages = [{"role": "user", "content": "?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    prompt = Prompt(prompt_id="p", token_ids=np.array(policy.ids(text), np.int32), text=text, answer="42")
    return await run_episode(loop, prompt, max_tokens, generate=policy.generate, timeout_s=10.0), policy


async def test_the_tokens_are_those_of_the_whole_conversation_and_only_generated_ones_are_trained(
    tokenizer: PreTrainedTokenizerFast, agent_args: dict[str, Any]
) -> None:
    first, second = (f"so {call_of('calculator', expression=text)}" for text in ("3 * 14", "2 +"))
    # The first turn would continue and make the result up; the second ends by itself with its call.
    said = [f"{first}\n<tool_response>41</tool_response>", second, f"It is 42.{END}"]
    episode, _ = await played(tokenizer, agent_args, *said)
    generated = ["".join(tokenizer.decode(turn.token_ids[turn.is_generated])) for turn in episode.turns()]
    assert (generated, episode.status) == ([first, second, said[2]], "completed")
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": first},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": second},
        {"role": "tool", "content": "error: calculator raised ValueError: '2 +' is no product or sum"},
        {"role": "assistant", "content": "It is 42."},
    ]
    assert episode.token_ids.tolist() == tokenizer.apply_chat_template(conversation)["input_ids"][:-1]
    assert (episode.logprobs == np.where(episode.loss_mask, -0.5, 0.0)).all()


SUM, WRONG = call_of("calculator", expression="3 * 14"), call_of("calculator", expression="2 +")


@pytest.mark.parametrize(
    ("said", "limits", "status", "calls", "errors"),
    [
        ([f"42{END}"], {}, "completed", 0, 0),
        ([WRONG, call_of("add"), "<tool_call>\n{</tool_call>", f"?{END}"], {}, "completed", 3, 3),
        ([SUM, WRONG, f"42{END}"], {}, "completed", 2, 1),
        ([SUM], {"max_tokens": 30}, "truncated", 0, 0),
        ([SUM] * 3, {"max_turns": 2}, "truncated", 2, 0),
    ],
)
async def test_calls_are_counted_and_those_that_the_policy_reads_an_error_of(
    tokenizer: PreTrainedTokenizerFast, agent_args: dict[str, Any], said: list[str], limits: dict[str, int],
    status: str, calls: int, errors: int,
) -> None:  # fmt: skip
    max_tokens = {"max_tokens": limits["max_tokens"]} if "max_tokens" in limits else {}
    turns = {"max_turns": limits["max_turns"]} if "max_turns" in limits else {}
    episode, _ = await played(tokenizer, agent_args | turns, *said, **max_tokens)
    assert (episode.status, episode.tool_use) == (status, ToolUse(num_calls=calls, num_errors=errors))


async def test_a_template_that_shows_tools_shows_them_and_its_arguments_hold_between_turns(
    agent_args: dict[str, Any], tmp_path: Path
) -> None:
    thinking = chat_tokenizer(THINKING)
    thinking.save_pretrained(tmp_path / "tokenizer")
    quiet = {"enable_thinking": False}
    _, policy = await played(thinking, agent_args, SUM, f"42{END}", max_tokens=4000, chat_template_kwargs=quiet)
    begin = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    result = "<tool_response>\n42\n</tool_response>"
    assert '"calculator"' in policy.asked[0] and '"expression"' in policy.asked[0]
    assert policy.asked[0].endswith(f"?{END}\n{begin}")
    assert policy.asked[1] == f"{policy.asked[0]}{SUM}{END}\n<|im_start|>user\n{result}{END}\n{begin}"


def test_a_tool_that_cannot_be_described_is_refused_only_where_it_would_be_shown(
    agent_args: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_tools.py").write_text("def bare(x): return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    args = agent_args | {"tools": ["bare_tools.bare"]}
    silent: Any = make_loop(TOOL_AGENT, args)
    assert (silent.tools, list(silent.tool_names)) == ([], ["bare"]), "the prompts have to name it"
    chat_tokenizer(THINKING).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(PluginError, match=r"bare because it has no docstring.* set tools_in_prompt=false"):
        make_loop(TOOL_AGENT, args)
    hidden: Any = make_loop(TOOL_AGENT, args | {"tools_in_prompt": False})
    assert (hidden.tools, list(hidden.tool_names)) == ([], []), "that is left to the user"


SILENT = "{% for one in messages %}{{ one.content if one.role != 'tool' }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": ["tools_of_the_docs.calculater"]}, "did you mean 'calculator'"),
        ({"tools": ["tools_of_the_docs.calculator"] * 2}, "distinct names"),
        ({"tools": ["tools_of_the_docs.re"]}, "must be paths of functions"),
        ({"chat_template": SILENT}, "does not show what a tool returned"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    tokenizer: PreTrainedTokenizerFast, agent_args: dict[str, Any], tmp_path: Path, changes: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    silent = copy(tokenizer)
    silent.chat_template = changes.get("chat_template", tokenizer.chat_template)
    silent.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(PluginError, match=message):
        make_loop(TOOL_AGENT, agent_args | {name: value for name, value in changes.items() if name == "tools"})


def test_a_tokenizer_with_custom_code_has_to_be_trusted(agent_args: dict[str, Any], tmp_path: Path) -> None:
    args = agent_args | {"tokenizer": str(save_own_tokenizer(tmp_path / "own"))}
    with pytest.raises(PluginError, match="contains custom code"):
        make_loop(TOOL_AGENT, args)
    make_loop(TOOL_AGENT, args | {"trust_remote_code": True})


# The result of a call


def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


async def slow_async() -> str:
    await asyncio.sleep(600)
    return "slept"


async def add(a: int, b: int = 0) -> int:
    return a + b


def echo(text: str) -> str:
    return text


def hidden(**numbers: int) -> object:
    return add(**numbers)


def describe(function: str, self: int = 1) -> str:
    return f"{function}{self}"


def fail() -> str:
    raise TimeoutError("of the tool")


def leave() -> str:
    raise SystemExit("bye")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", None),
        (call_of("add", a=1, b=2), "3"),
        (call_of("hidden", a=1, b=2), "3"),
        (call_of("echo", text="a\ud800b"), "a?b"),  # half a surrogate pair, which JSON can spell and no tokenizer takes
        (call_of("echo", text="x" * 60), "x" * 50 + "... (10 more characters)"),
        (call_of("describe", function="f", self=2), "f2"),
        (call_of("ad"), "error: there is no tool 'ad'; there are: slow, s"),
        (call_of("add", c=1), "error: add raised TypeError: add() got an unexpect"),
        (call_of("fail"), "error: fail raised TimeoutError: of the tool"),
        (call_of("leave"), "error: leave raised SystemExit: bye"),
        (call_of("slow", seconds=0.6), "error: slow took longer than 0.3 s"),
        (call_of("slow_async"), "error: slow_async took longer than 0.3 s"),
        ("<tool_call>{", "error: the call does not end with </tool_call>"),
    ],
)
async def test_the_policy_reads_the_result_or_what_was_wrong(text: str, expected: str | None) -> None:
    functions = {
        function.__name__: function for function in (slow, slow_async, add, echo, hidden, describe, fail, leave)
    }
    timeout_s = 0.3 if "slow" in text else 60.0
    reply = await Toolbox(functions, timeout_s=timeout_s, max_result_chars=50).reply(text)
    assert (reply is None) == (expected is None)
    if reply is not None and expected is not None:
        assert reply[0].startswith(expected) and reply[1] == expected.startswith("error: ")


async def test_tools_that_block_do_not_wait_for_one_another() -> None:
    """As many as there may be trajectories: a wait for a thread counts as time of the call."""
    everybody = threading.Barrier(200, timeout=60.0)
    box = Toolbox({"meet": lambda: everybody.wait() >= 0}, timeout_s=60.0, max_result_chars=50)
    assert set(await asyncio.gather(*(box.reply(call_of("meet")) for _ in range(200)))) == {("True", False)}


async def test_threads_that_outlive_their_callers_are_counted_and_logged_until_they_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads, release = UserThreads("tool", max_threads=3), threading.Event()
    for number in (1, 2, 3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await threads.run(release.wait)
        assert threads.num_hanging == num_hanging() == number
    assert [record.getMessage()[:12] for record in caplog.records] == ["1 of 3 threa", "2 of 3 threa"]
    with pytest.raises(AllThreadsHang, match="all 3 threads for tools still run calls"):
        async with asyncio.timeout(1.0):  # it does not wait until a timeout
            await threads.run(release.wait)
    release.set()
    async with asyncio.timeout(5):
        while threads.num_hanging:
            await asyncio.sleep(0.01)
    assert await threads.run(int, "7") == 7
    threads.close()


async def test_a_call_that_never_got_a_thread_hangs_none() -> None:
    threads, release = UserThreads("agent", max_threads=1), threading.Event()
    running = asyncio.create_task(threads.run(release.wait, 5.0))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await threads.run(release.wait)
    assert threads.num_hanging == 0
    release.set()
    assert await running
    threads.close()
