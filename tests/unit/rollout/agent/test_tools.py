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
from rollout.agent.tools import Toolbox, TurnTemplate
from rollout.engine.interface import EngineSpec
from rollout.errors import PluginError
from rollout.types import Prompt, SamplingParams, TokenChunk, ToolUse, join_chunks
from tests.fakes.chat_tokenizer import END, PLAIN, THINKING, chat_tokenizer
from tests.fakes.own_tokenizer import save_own_tokenizer
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.trajectories import make_chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

    from rollout.types import Trajectory


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer(PLAIN)


def call_of(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def agent_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """With the tool of the documentation."""
    text = (Path(__file__).parents[4] / "docs" / "agents.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def calculator" in block]
    (tmp_path / "tools_of_the_docs.py").write_text(blocks[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return {"tokenizer": str(tmp_path / "tokenizer"), "tools": ["tools_of_the_docs.calculator"]}


async def play_on_engine(
    tokenizer: PreTrainedTokenizerFast, agent_args: dict[str, Any], said: Sequence[str], *, max_tokens: int = 800
) -> Trajectory:
    """A policy that says `said`, turn by turn, on an engine that ends at stop texts."""
    answers = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in said]
    begin = tokenizer("<|im_start|>assistant", add_special_tokens=False)["input_ids"]

    def script(prompt: np.ndarray, position: int, version: int) -> tuple[int, float]:
        num_turns = sum(prompt[i : i + len(begin)].tolist() == begin for i in range(len(prompt)))
        return answers[num_turns - 1][position], -0.5

    engine = ScriptedEngine(
        EngineSpec(model="scripted", stop_token_ids=(tokenizer.eos_token_id,)), script=script, decode=tokenizer.decode
    )
    await engine.start()
    numbers = iter(range(100))

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        params = SamplingParams(max_tokens=max_tokens, stop=tuple(stop))
        chunks = [chunk async for chunk in engine.generate(str(next(numbers)), token_ids, params)]
        return join_chunks(chunks, chunks[-1].finish_reason)

    ids = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=True)["input_ids"]
    prompt = Prompt(prompt_id="p", token_ids=np.array(ids, np.int32), text="?", answer="42")
    loop = make_loop("rollout.agent.tools.tool_agent", agent_args)
    return await run_episode(loop, prompt, max_tokens, generate=generate, timeout_s=10.0)


async def test_the_tokens_are_those_of_the_whole_conversation_and_only_generated_ones_are_trained(
    tokenizer: PreTrainedTokenizerFast, agent_args: dict[str, Any]
) -> None:
    first, second = (f"so {call_of('calculator', expression=text)}" for text in ("3 * 14", "2 +"))
    # The first turn would go on and make the result up; the second ends by itself with its call.
    said = [f"{first}\n<tool_response>41</tool_response>", second, f"It is 42.{END}"]
    episode = await play_on_engine(tokenizer, agent_args, said)
    tokens = np.concatenate([turn.token_ids for turn in episode.turns()]).tolist()
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
    assert tokenizer.decode(tokens) + "\n" == tokenizer.apply_chat_template(conversation, tokenize=False)
    assert tokens == tokenizer.apply_chat_template(conversation)["input_ids"][:-1]
    for turn in episode.turns():
        assert (turn.logprobs[turn.is_generated] == -0.5).all()
        assert (turn.logprobs[~turn.is_generated] == 0).all()


SUM, WRONG = call_of("calculator", expression="3 * 14"), call_of("calculator", expression="2 +")


@pytest.mark.parametrize(
    ("said", "limits", "status", "calls", "errors"),
    [
        ([f"42{END}"], {}, "completed", 0, 0),
        ([SUM, f"42{END}"], {}, "completed", 1, 0),
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
    limits = dict(limits)
    max_tokens = limits.pop("max_tokens", 800)
    episode = await play_on_engine(tokenizer, agent_args | limits, said, max_tokens=max_tokens)
    assert (episode.status, episode.tool_use) == (status, ToolUse(num_calls=calls, num_errors=errors))


def test_the_end_of_a_turn_is_neither_left_out_nor_repeated(tokenizer: PreTrainedTokenizerFast) -> None:
    template = TurnTemplate(tokenizer)
    said = tokenizer("x", add_special_tokens=False)["input_ids"]
    reply = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(template.tokens(said, "42")) == END + reply
    assert tokenizer.decode(template.tokens([*said, tokenizer.eos_token_id], "42")) == reply
    assert tokenizer.decode(template.tokens([*said, tokenizer.unk_token_id], "42")) == END + reply


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


def long() -> str:
    return "x" * 60


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
        (f"I call it with <tool_call>, then JSON. {call_of('add', a=1, b=2)}", "3"),
        (call_of("echo", text="<tool_call>"), "<tool_call>"),
        (call_of("echo", text="a\ud800b"), "a?b"),  # half a surrogate pair, which JSON can spell and no tokenizer takes
        ("<tool_call>3 * 14</tool_call>", "error: the call is not valid JSON"),
        ("the sum, please</tool_call>", "error: the call does not begin with <tool_call>"),
        (call_of("long"), "x" * 50 + "... (10 more characters)"),
        (call_of("ad"), "error: there is no tool 'ad'; there are: slow, s"),
        (call_of("add", c=1), "error: add raised TypeError: add() got an unexpect"),
        (call_of("fail"), "error: fail raised TimeoutError: of the tool"),
        (call_of("leave"), "error: leave raised SystemExit: bye"),
        (call_of("slow", seconds=0.6), "error: slow took longer than 0.3 s"),
        (call_of("slow_async"), "error: slow_async took longer than 0.3 s"),
        ("<tool_call>{", "error: the call does not end with </tool_call>"),
        ("<tool_call>{</tool_call>", "error: the call is not valid JSON: Expecting prope"),
        (f"<tool_call>{'7' * 5000}</tool_call>", "error: the call is not valid JSON: Exceeds"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "error: the call is not valid JSON: "),
        ("<tool_call>[]</tool_call>", 'error: a call is {"name": "...", "arguments": {...'),
        ('<tool_call>{"name": "add"}</tool_call>', 'error: a call is {"name": "...", "arguments": {...'),
    ],
)
async def test_the_policy_reads_the_result_or_what_was_wrong(text: str, expected: str | None) -> None:
    functions = {function.__name__: function for function in (slow, slow_async, add, echo, hidden, long, fail, leave)}
    timeout_s = 0.3 if "slow" in text else 60.0
    reply = await Toolbox(functions, timeout_s=timeout_s, max_result_chars=50).reply(text)
    assert (reply is None) == (expected is None)
    if reply is not None and expected is not None:
        assert reply[0].startswith(expected) and reply[1] == expected.startswith("error: ")


async def test_tools_that_block_do_not_wait_for_one_another() -> None:
    """As many as there may be trajectories; the loop's own pool has a few threads, and a wait for one would count."""
    begun, everybody = [0], threading.Event()

    def meet() -> str:
        begun[0] += 1
        if begun[0] == 200:
            everybody.set()
        return "met" if everybody.wait(60.0) else "alone"

    box = Toolbox({"meet": meet}, timeout_s=60.0, max_result_chars=50)
    assert set(await asyncio.gather(*(box.reply(call_of("meet")) for _ in range(200)))) == {("met", False)}


SILENT = "{% for one in messages %}{{ one.content if one.role != 'tool' }}<|im_end|>{% endfor %}"
OWN = "own"
"""A tokenizer that brings its own code."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": ["tools_of_the_docs.calculater"]}, "did you mean 'calculator'"),
        ({"tools": ["tools_of_the_docs.calculator"] * 2}, "names of their own"),
        ({"tools": ["tools_of_the_docs.re"]}, "must be paths of functions"),
        ({"chat_template": SILENT}, "does not show what a tool returned"),
        ({"tokenizer": OWN}, "contains custom code"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    tokenizer: PreTrainedTokenizerFast, agent_args: dict[str, Any], tmp_path: Path, changes: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    changes = dict(changes)
    if template := changes.pop("chat_template", None):
        silent = copy(tokenizer)
        silent.chat_template = template
        silent.save_pretrained(tmp_path / "tokenizer")
    if changes.get("tokenizer") == OWN:
        changes["tokenizer"] = str(save_own_tokenizer(tmp_path / OWN))
    with pytest.raises(PluginError, match=message):
        make_loop("rollout.agent.tools.tool_agent", agent_args | changes)
    if "tokenizer" in changes:
        make_loop("rollout.agent.tools.tool_agent", {**agent_args, **changes, "trust_remote_code": True})


async def test_a_template_that_shows_tools_shows_them_and_its_arguments_hold_between_turns(
    agent_args: dict[str, Any], tmp_path: Path
) -> None:
    thinking = chat_tokenizer(THINKING)
    thinking.save_pretrained(tmp_path / "tokenizer")
    loop: Any = make_loop("rollout.agent.tools.tool_agent", agent_args, chat_template_kwargs={"enable_thinking": False})
    (tool,) = loop.tools
    assert tool["function"]["name"] == "calculator"
    assert tool["function"]["parameters"]["properties"]["expression"]["type"] == "string"
    messages = [{"role": "user", "content": "?"}]
    text = thinking.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, tools=loop.tools, enable_thinking=False
    )
    said = [call_of("calculator", expression="3 * 14"), "42"]
    asked: list[str] = []

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        asked.append(thinking.decode(token_ids))
        ids = thinking(said[len(asked) - 1], add_special_tokens=False)["input_ids"]
        return make_chunk(ids)

    ids = thinking(text, add_special_tokens=False)["input_ids"]
    prompt = Prompt(prompt_id="p", token_ids=np.array(ids, np.int32), text=text, answer="42")
    await run_episode(loop, prompt, 2000, generate=generate, timeout_s=10.0)
    begin = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    result = "<tool_response>\n42\n</tool_response>"
    assert asked[0].endswith(f"?{END}\n{begin}")
    assert asked[1] == asked[0] + said[0] + f"{END}\n<|im_start|>user\n{result}{END}\n{begin}"


def test_a_tool_that_cannot_be_described_is_refused_only_where_it_would_be_shown(
    tokenizer: PreTrainedTokenizerFast, agent_args: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_tools.py").write_text("def bare(x): return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    args = agent_args | {"tools": ["bare_tools.bare"]}
    silent: Any = make_loop("rollout.agent.tools.tool_agent", args)
    assert silent.tools == [], "its template shows no tools"
    assert list(silent.tool_names) == ["bare"], "so the prompts have to name it"
    chat_tokenizer(THINKING).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(PluginError, match=r"bare because it has no docstring.* set tools_in_prompt=false"):
        make_loop("rollout.agent.tools.tool_agent", args)
    told: Any = make_loop("rollout.agent.tools.tool_agent", args | {"tools_in_prompt": False})
    assert told.tools == []
    assert list(told.tool_names) == [], "that is left to the user"


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
    began = time.monotonic()
    with pytest.raises(AllThreadsHang, match="all 3 threads for tools still run calls"):
        await threads.run(release.wait)
    assert time.monotonic() - began < 1.0, "it does not wait out its time"
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
