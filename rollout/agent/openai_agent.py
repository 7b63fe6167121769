"""Agents written for OpenAI's API, as they are: the policy answers at an address of its own for every trajectory."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from rollout.agent.loop import Episode
from rollout.agent.openai_api import MODEL
from rollout.agent.openai_server import Server
from rollout.agent.openai_session import Session
from rollout.agent.template import ChatTemplate
from rollout.errors import AgentError
from rollout.plugins import load
from rollout.tokenizer import load_tokenizer
from weight_sync.addresses import reachable_host

if TYPE_CHECKING:
    from rollout.agent.loop import AgentLoop, Generate
    from rollout.types import Prompt, TrajectoryStatus, Turn

_MOST_THREADS = 1024
"""Of one rollout worker, for agents that block; they start as they are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent gets: one row of the data set, and where the policy is.

    Example:
        client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        await client.chat.completions.create(model=task.model, messages=list(task.messages))
    """

    prompt: str
    """Text of the prompt; after the chat template, if it went through one."""
    messages: Sequence[Mapping[str, Any]]
    """The same as chat messages; of a prompt that went through no chat template, `prompt` as one of the user."""
    answer: str
    """Ground truth, for agents that give rewards themselves."""
    metadata: Mapping[str, object]
    """Further columns of the row."""
    base_url: str
    """Of OpenAI's API; answers until `solve` returns."""
    api_key: str
    model: str = MODEL


Solve = Callable[[Task], Awaitable[float | None] | float | None]


def openai_agent(
    *,
    solve: str,
    tokenizer: str,
    host: str = "127.0.0.1",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> AgentLoop:
    """The factory for `task.agent`.

    Args:
        solve: dotted path of a function that gets a `Task`, does the work, and returns a reward on top of that of the
            reward function, or None. A plain function runs in a thread, so it may block.
        tokenizer: directory or hub name, with a chat template.
        host: address that agents reach the policy at: of this machine, or "auto" for the one that other hosts see.
        chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
        trust_remote_code: run Python code that comes with the tokenizer.

    Raises:
        PluginError: `solve` does not import.
        ValueError: it is no function, the tokenizer has no chat template that can be used, or `host` is no address.
    """
    function = load(solve, what="agent")
    if not callable(function):
        raise ValueError(f"solve must be the path of a function, got {solve}, a {type(function).__name__}")
    template = ChatTemplate(load_tokenizer(tokenizer, trust_remote_code=trust_remote_code))
    return OpenAiLoop(
        cast("Solve", function),
        template=template,
        host=reachable_host() if host == "auto" else _checked_address(host),
        variables=dict(chat_template_kwargs or {}),
    )


def _checked_address(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(f'host must be "auto" or an IPv4 or IPv6 address, got {host!r}') from error
    if address.is_unspecified:
        raise ValueError(
            f'host must be an address that agents can connect to, got {host!r}, which means any; use "auto"'
        )
    return str(address)


class OpenAiLoop:
    """Runs `solve` for one trajectory after another, with a server that is started by the first."""

    def __init__(
        self,
        solve: Solve,
        *,
        template: ChatTemplate,
        host: str = "127.0.0.1",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._solve, self._template = solve, template
        self._server = Server(host, variables or {})
        self._threads = ThreadPoolExecutor(max_workers=_MOST_THREADS, thread_name_prefix="agent")

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        session = Session(
            prompt,
            max_tokens,
            generate=generate,
            template=self._template,
            give_up=lambda: limit.reschedule(loop.time()),
        )
        reward = None
        try:
            async with limit, self._server.open(session) as (base_url, api_key):
                reward = await self._solved(_task(prompt, base_url, api_key))
        except Exception:
            # Where the policy could not answer any more, most agents raise; that is no failure of theirs.
            if session.failure is None and _status(session) == "completed":
                raise
        if session.failure is not None:
            raise session.failure
        return Episode(turns=_rewarded(session.turns(), reward, status=_status(session)), status=_status(session))

    async def close(self) -> None:
        """Stops the server. Agents that still run in threads are not waited for."""
        await self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _solved(self, task: Task) -> float | None:
        if inspect.iscoroutinefunction(self._solve):
            return await self._solve(task)
        result = await asyncio.get_running_loop().run_in_executor(self._threads, self._solve, task)
        return await result if inspect.isawaitable(result) else result


def _task(prompt: Prompt, base_url: str, api_key: str) -> Task:
    return Task(
        prompt=prompt.text,
        messages=prompt.messages or ({"role": "user", "content": prompt.text},),
        answer=prompt.answer,
        metadata=prompt.metadata,
        base_url=base_url,
        api_key=api_key,
    )


def _status(session: Session) -> TrajectoryStatus:
    if session.ran_out_of_time:
        return "failed"
    return "truncated" if session.ran_out_of_room else "completed"


def _rewarded(turns: tuple[Turn, ...], reward: float | None, *, status: TrajectoryStatus) -> tuple[Turn, ...]:
    """With the agent's reward at the last turn in which the policy spoke."""
    last = max((number for number, turn in enumerate(turns) if turn.segments), default=None)
    if last is None and status == "completed":
        raise AgentError("solve returned, and the policy has said nothing; ask it at task.base_url")
    if reward is None:
        return turns
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise AgentError(f"solve must return a finite number or None, got {reward!r}")
    if last is None:
        return turns
    return (*turns[:last], replace(turns[last], reward=float(reward)), *turns[last + 1 :])
