"""How trajectories of agents that speak OpenAI's API end: well, in failure, late, and with which reward."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from rollout.agent.openai_agent import MAX_BYTES, OpenAiLoop, Task
from rollout.agent.runner import make_loop, run_episode
from rollout.errors import AgentError, PluginError
from rollout.fleet.scheduler import NoReplica
from rollout.rendering import ChatTemplateRenderer
from rollout.types import SamplingParams, TokenChunk
from rollout.worker.worker import RolloutWorker
from tests.fakes.chat_policy import TEMPLATE, ChatPolicy, by_turn
from tests.fakes.chat_tokenizer import END, chat_tokenizer
from tests.fakes.engine_client import FakeEngine
from tests.fakes.rollout_worker import length_score, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.agent.loop import Generate
    from rollout.types import Trajectory

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "2+3?"}


@pytest.fixture
async def policy() -> ChatPolicy:
    return await ChatPolicy(by_turn(*[f"one{END}"] * 9)).start()


@asynccontextmanager
async def client_of(task: Task) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:

        async def chat(*messages: Message, **arguments: Any) -> Any:
            return await client.chat.completions.create(model=task.model, messages=list(messages), **arguments)  # type: ignore[call-overload]

        yield chat


async def played(solve: Any, policy: ChatPolicy, *, generate: Generate | None = None, **changes: Any) -> Trajectory:
    loop = OpenAiLoop(solve, template=ChatTemplateRenderer(policy.tokenizer), host=changes.pop("host", "127.0.0.1"))
    try:
        limits: dict[str, Any] = {"max_tokens": 300, "timeout_s": 20.0} | changes
        return await run_episode(
            loop,
            policy.prompt(),
            limits["max_tokens"],
            generate=policy.generate if generate is None else generate,
            timeout_s=limits["timeout_s"],
        )
    finally:
        await loop.close()


async def asks_once(task: Task) -> None:
    async with client_of(task) as chat:
        await chat(USER)


async def asks_until_there_is_no_room(task: Task) -> None:
    async with client_of(task) as chat:
        messages = [USER]
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            while True:
                said = (await chat(*messages)).choices[0].message
                messages += [{"role": "assistant", "content": said.content}, USER]
        assert refused.value.code == "context_length_exceeded" and len(messages) > 3
        raise KeyError("no response")


async def asks_for_little(task: Task) -> None:
    async with client_of(task) as chat:
        await chat(USER, max_tokens=2)


async def continues_with_less_history(task: Task) -> None:
    with pytest.raises(openai.BadRequestError):
        async with client_of(task) as chat:
            await chat({"role": "user", "content": "x" * 1000})
    await asks_once(task)


@pytest.mark.parametrize(
    ("solve", "max_tokens", "status"),
    [
        (asks_until_there_is_no_room, 100, "truncated"),
        (asks_once, 2, "truncated"),
        (asks_for_little, 300, "completed"),
        (continues_with_less_history, 300, "completed"),
    ],
)
async def test_a_trajectory_is_truncated_if_its_last_response_lacked_room(
    policy: ChatPolicy, solve: Any, max_tokens: int, status: str
) -> None:
    assert (await played(solve, policy, max_tokens=max_tokens)).status == status


@pytest.mark.parametrize("error", [None, KeyError("my tool")])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("reward", [None, 2, -0.5, np.float32(0.5), float("nan"), True, "1", [1.0]])
async def test_the_reward_goes_to_the_last_turn_and_what_an_agent_did_wrong_is_the_reason(
    policy: ChatPolicy, reward: Any, asks: bool, error: Exception | None
) -> None:
    async def solve(task: Task) -> Any:
        async with client_of(task) as chat:
            if asks:
                await chat(USER)
                await chat(USER, {"role": "assistant", "content": "one"}, USER)
        if error is not None:
            raise error
        return reward

    reason = ""
    if error is not None:
        reason = r"raised KeyError: 'my tool' \(test_openai_agent.py:\d+\)"
    elif not asks:
        reason = "the policy has said nothing"
    elif reward not in (None, 2, -0.5, 0.5) or reward is True:
        reason = "must return a finite number or None"
    if reason:
        with pytest.raises(AgentError, match=reason):
            await played(solve, policy)
    else:
        turns = (await played(solve, policy)).turns()
        assert [turn.reward for turn in turns] == [0.0, 0.0 if reward is None else reward]


async def test_a_generation_that_runs_out_of_time_fails_the_trajectory_at_once(policy: ChatPolicy) -> None:
    ended = []

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        return replace(await policy.generate(token_ids, 2, stop=stop), finish_reason="abort")

    async def solve(task: Task) -> None:
        try:
            await asks_once(task)
            await asyncio.sleep(3600)
        except openai.NotFoundError:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    episode = await played(solve, policy, generate=generate, timeout_s=60.0)
    assert (episode.status, ended) == ("failed", [True])


async def test_an_agent_that_hangs_ends_at_the_deadline_with_its_generation_and_its_address(
    policy: ChatPolicy,
) -> None:
    policy.engine.faults.hang_generation = True
    tasks: list[Task] = []
    loop = OpenAiLoop(asks_once_and_notes(tasks), template=ChatTemplateRenderer(policy.tokenizer))
    before = asyncio.all_tasks()
    with pytest.raises(AgentError, match=r"longer than task\.agent_timeout_s=3"):
        await run_episode(loop, policy.prompt(), 300, generate=policy.generate, timeout_s=3.0)
    assert (len(policy.asked), policy.engine._live) == (1, {})
    with pytest.raises(openai.NotFoundError, match="no such trajectory, or it has ended"):
        await asks_once(tasks[0])
    await loop.close()
    await asyncio.sleep(0)
    assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()


def asks_once_and_notes(tasks: list[Task]) -> Any:
    async def solve(task: Task) -> None:
        tasks.append(task)
        await asks_once(task)

    return solve


async def test_a_request_that_is_under_way_when_the_trajectory_ends_is_answered_so(policy: ChatPolicy) -> None:
    policy.engine.faults.hang_generation = True
    asking: list[asyncio.Task[None]] = []

    async def solve(task: Task) -> None:
        asking.append(asyncio.create_task(asks_once(task)))
        await policy.has_begun.wait()

    with pytest.raises(AgentError, match="the policy has said nothing"):
        await played(solve, policy)
    with pytest.raises(openai.NotFoundError, match="this trajectory has ended"):
        await asking[0]
    assert (len(policy.asked), policy.engine._live) == (1, {})


@pytest.mark.parametrize("answer", ["raise", "hang", "ask"])
async def test_an_engine_that_fails_is_no_failure_of_the_agent_and_ends_it(policy: ChatPolicy, answer: str) -> None:
    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        raise NoReplica("all are dead")

    async def solve(task: Task) -> None:
        while True:
            try:
                await asks_once(task)
            except openai.APIError:
                if answer == "raise":
                    raise
                if answer == "hang":
                    await asyncio.sleep(3600)

    with pytest.raises(NoReplica, match="all are dead"):
        await played(solve, policy, generate=generate, timeout_s=60.0)


async def test_a_client_in_a_thread_is_told_once_what_an_engine_raised(policy: ChatPolicy) -> None:
    told: asyncio.Queue[Exception] = asyncio.Queue()
    here, num_asked = asyncio.get_running_loop(), [0]

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        num_asked[0] += 1
        raise NoReplica("all are dead")

    def solve(task: Task) -> None:
        with OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            message: Any = USER
            try:
                client.chat.completions.create(model=task.model, messages=[message])
            except openai.APIError as error:
                here.call_soon_threadsafe(told.put_nowait, error)

    loop = OpenAiLoop(solve, template=ChatTemplateRenderer(policy.tokenizer))
    with pytest.raises(NoReplica, match="all are dead"):
        await loop.run(policy.prompt(), 300, generate)
    error = await told.get()
    assert isinstance(error, openai.BadRequestError)
    assert (error.code, "NoReplica: all are dead" in error.message, num_asked) == ("engine_error", True, [1])
    await loop.close()


async def test_many_trajectories_share_a_server_and_nothing_else(policy: ChatPolicy) -> None:
    everybody = asyncio.Barrier(200)

    async def solve(task: Task) -> float:
        await everybody.wait()
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=shared) as client:
            message: Any = {"role": "user", "content": task.prompt}
            await client.chat.completions.create(model=task.model, messages=[message])
            return float(task.answer)

    loop = OpenAiLoop(solve, template=ChatTemplateRenderer(policy.tokenizer))
    prompts = [replace(policy.prompt(), text=f"number {n}", answer=str(n)) for n in range(200)]
    async with openai.DefaultAsyncHttpxClient() as shared:
        episodes = await asyncio.gather(
            *(run_episode(loop, prompt, 300, generate=policy.generate, timeout_s=60.0) for prompt in prompts)
        )
    await loop.close()
    for n, episode in enumerate(episodes):
        assert f"user\nnumber {n}{END}" in policy.spoken(episode.turns())
        assert episode.turns()[0].reward == n


async def test_a_plain_function_may_block(policy: ChatPolicy) -> None:
    def solve(task: Task) -> float:
        with OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            message: Any = USER
            answer = client.chat.completions.create(model=task.model, messages=[message])
            return float(answer.choices[0].message.content == "one")

    assert [turn.reward for turn in (await played(solve, policy)).turns()] == [1.0]


@pytest.mark.parametrize("messages", [(), ({"role": "system", "content": "Be brief."}, USER)])
async def test_an_agent_gets_the_prompt_as_messages(policy: ChatPolicy, messages: tuple[Message, ...]) -> None:
    seen: list[Task] = []
    loop = OpenAiLoop(asks_once_and_notes(seen), template=ChatTemplateRenderer(policy.tokenizer))
    prompt = replace(policy.prompt(), messages=messages)
    await run_episode(loop, prompt, 300, generate=policy.generate, timeout_s=20.0)
    await loop.close()
    assert list(seen[0].messages) == (list(messages) or [{"role": "user", "content": prompt.text}])


async def test_an_address_of_nobody_here_is_told_and_not_remembered(
    policy: ChatPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AgentError, match=r"cannot be reached at 192.0.2.1: .* set host in task.agent_args"):
        await played(asks_once, policy, host="192.0.2.1")
    loop = OpenAiLoop(asks_once, template=ChatTemplateRenderer(policy.tokenizer))
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", refuses)
        with pytest.raises(AgentError, match="cannot be reached"):
            await run_episode(loop, policy.prompt(), 300, generate=policy.generate, timeout_s=20.0)
    assert (
        await run_episode(loop, policy.prompt(), 300, generate=policy.generate, timeout_s=20.0)
    ).status == "completed"
    await loop.close()


def refuses(*_: object) -> None:
    raise OSError(errno.EADDRINUSE, "address already in use")


async def test_ipv6_addresses_can_be_asked_at(policy: ChatPolicy) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    assert (await played(asks_once, policy, host="::1")).status == "completed"


async def test_the_server_tells_its_model_and_what_it_does_not_have(policy: ChatPolicy) -> None:
    async def solve(task: Task) -> None:
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            assert [model.id async for model in client.models.list()] == [task.model]
            with pytest.raises(openai.NotFoundError, match=r"POST /embeddings.*there are POST /chat/completions"):
                await client.embeddings.create(model=task.model, input="x")
        await asks_once(task)

    await played(solve, policy)


@pytest.mark.parametrize(
    ("length", "most_read"),
    [("Transfer-Encoding: chunked", MAX_BYTES), (f"Content-Length: {4 * MAX_BYTES}", 0)],
    ids=["chunked", "declared"],
)
async def test_a_request_without_a_trajectory_is_answered_before_its_body_is_read(
    policy: ChatPolicy, length: str, most_read: int
) -> None:
    async def solve(task: Task) -> None:
        address = urlsplit(task.base_url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"POST /nobody/v1/chat/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ")
        assert b"Connection: close" in head
        num_sent, piece = 0, b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with pytest.raises(ConnectionError):
            while num_sent < 3 * MAX_BYTES:
                writer.write(piece)
                await writer.drain()
                num_sent += len(piece)
        assert num_sent < most_read + (32 << 20)  # what the system holds of a connection
        writer.close()
        await asks_once(task)

    await played(solve, policy)


async def test_a_request_of_a_size_that_is_allowed_is_told_that_its_trajectory_has_ended(policy: ChatPolicy) -> None:
    """Were its connection to break, its client would try again."""

    async def solve(task: Task) -> None:
        async with AsyncOpenAI(base_url=task.base_url.replace(task.api_key, "nobody"), api_key="x") as client:
            for size in (1, 1 << 19, 20 << 20):
                with pytest.raises(openai.NotFoundError, match="no such trajectory, or it has ended"):
                    await client.chat.completions.create(
                        model=task.model, messages=[{"role": "user", "content": "x" * size}]
                    )
        await asks_once(task)

    await played(solve, policy)


async def test_an_evaluation_plays_agents_too() -> None:
    loop = OpenAiLoop(asks_once, template=ChatTemplateRenderer(chat_tokenizer(TEMPLATE)))
    settings = spec(agent="mine.make", agent_timeout_s=100.0)
    busy = RolloutWorker(
        settings, [FakeEngine("e0")], tokenizer=chat_tokenizer(TEMPLATE), score=length_score, loop=loop
    )
    prompts = [replace(ChatPolicy(by_turn()).prompt(), prompt_id=str(n)) for n in range(3)]
    trajectories = await busy.evaluate(prompts, SamplingParams(max_tokens=9, temperature=0.0), engine="e0")
    assert [(one.status, one.num_generated_tokens) for one in trajectories] == [("truncated", 9)] * 3
    await loop.close()


def solve_of_the_test(task: Task) -> None: ...


NUMBER = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solve": f"{__name__}.solve_of_the_tests"}, "did you mean 'solve_of_the_test'"),
        ({"solve": f"{__name__}.NUMBER"}, "solve must be the path of a function"),
        ({"host": "localhost"}, 'host must be "auto" or an IPv4 or IPv6 address'),
        ({"host": "0.0.0.0"}, "which means any"),
        ({"chat_template": None}, "the tokenizer has no chat template"),
        ({"chat_template": "{{ messages[0].content }}"}, "does not show what an assistant said"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    tokenizer.chat_template = changes.pop("chat_template", tokenizer.chat_template)
    tokenizer.save_pretrained(tmp_path)
    args = {"solve": f"{__name__}.solve_of_the_test", "tokenizer": str(tmp_path)}
    with pytest.raises(PluginError, match=message):
        make_loop("rollout.agent.openai_agent.openai_agent", args | changes)


def test_an_agent_for_other_hosts_listens_where_they_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOST", "127.0.0.2")
    chat_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    args = {"solve": f"{__name__}.solve_of_the_test", "tokenizer": str(tmp_path), "host": "auto"}
    loop: Any = make_loop("rollout.agent.openai_agent.openai_agent", args)
    assert loop._server._host == "127.0.0.2"
