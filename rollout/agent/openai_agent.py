"""An agent of any kind, reached by OpenAI's API at an address that each trajectory gets."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from rollout.agent.openai_protocol import MODEL, ApiError, events, parse_request, response_body
from rollout.agent.openai_session import Session
from rollout.agent.threads import UserThreads
from rollout.errors import AgentError
from rollout.plugins import load
from rollout.rendering import ChatTemplateRenderer, load_tokenizer
from rollout.types import Trajectory
from weight_sync.node import reachable_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Handler

    from rollout.agent.loop import AgentLoop, Generate
    from rollout.types import Prompt, TrajectoryStatus, Turn


log = logging.getLogger(__name__)
MAX_BYTES = 64 << 20
"""Of a request: a conversation of a million tokens, with room to spare."""
_LINGER_S, _FAREWELL_S = 10.0, 1.0
"""For a body that is not needed; between a response and the end of a connection with more in it than is read."""
_BACKLOG = 4096
"""Connections that may wait to be accepted: groups begin together, and with them their agents."""


class Server:
    """Responds for the sessions that are open. Starts with the first one, and listens until it is closed.

    Args:
        host: address to listen on, and to give to agents.
        variables: of the chat template.
    """

    def __init__(self, host: str, variables: Mapping[str, object]) -> None:
        self._host, self._variables = host, variables
        self._sessions: dict[str, Session] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._warned: set[str] = set()

    @contextlib.asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """Base URL and API key of the session while the block runs; neither can be guessed.

        Raises:
            AgentError: the server cannot listen. The next session tries again.
        """
        async with self._starting:
            if self._runner is None:
                self._runner = await self._started()
        port = self._runner.addresses[0][1]
        # Only the holder of the key may speak for a trajectory. What is sampled does not depend on it.
        key = secrets.token_urlsafe(18)
        self._sessions[key] = session
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield f"http://{host}:{port}/{key}/v1", key
        finally:
            del self._sessions[key]
            await session.close()

    async def close(self) -> None:
        """Stops listening."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _started(self) -> web.AppRunner:
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[_errors])
        app.router.add_post("/{key}/v1/chat/completions", self._chat)
        app.router.add_get("/{key}/v1/models", self._models)
        # A client that goes away ends its generation.
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, lingering_time=0.0
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(runner.cleanup)
            try:
                await runner.setup()
                await web.TCPSite(runner, self._host, 0, backlog=_BACKLOG).start()
            except OSError as error:
                do = 'set host in task.agent_args to "auto", or to an address of this machine'
                raise AgentError(f"the policy cannot be reached at {self._host}: {error}; {do}") from error
            undo.pop_all()
        return runner

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["key"])
        if session is None:
            raise ApiError("there is no such trajectory, or it has ended", status=404, code="trajectory_ended")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tandem"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is no JSON: {error}") from error
        asked = parse_request(body, self._variables)
        for name in sorted(asked.ignored.keys() - self._warned):
            log.warning(
                "an agent asks for %s=%.100r, which changes nothing; the run sets how the policy samples",
                name, asked.ignored[name],
            )  # fmt: skip
            self._warned.add(name)
        response = await session.respond(asked)
        created, response_id = int(time.time()), f"chatcmpl-{secrets.token_hex(8)}"
        if not asked.stream:
            return web.json_response(response_body(response, response_id=response_id, created=created))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        lines = events(response, response_id=response_id, created=created, include_usage=asked.include_usage)
        await stream.write("".join(lines).encode())
        await stream.write_eof()
        return stream


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in OpenAI's form, and with no status that clients try again for."""
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        what = f"{request.method} /{request.path.partition('/v1/')[2]}: {error.reason}"
        message = f"{what}; there are POST /chat/completions, of {MAX_BYTES >> 20} MiB at most, and GET /models"
        failure = ApiError(message, status=error.status, code="not_found")
    except Exception as error:  # noqa: BLE001 - the edge: what an engine raised ends the trajectory, and is raised there
        log.warning("a request of an agent failed: %s: %s", type(error).__name__, error)
        failure = ApiError(f"{type(error).__name__}: {error}", code="engine_error")
    response = web.json_response(failure.body(), status=failure.status)
    if request.can_read_body:
        await _respond_early(request, response)
    return response


async def _respond_early(request: web.Request, response: web.StreamResponse) -> None:
    """Responds to a request whose body is not read yet, then closes the connection.

    Most clients read a response when they have sent everything, so a body of a size that is allowed is read and thrown
    away. A larger one is not read any further; its client has a moment for the response before its connection breaks.
    """
    response.force_close()
    await response.prepare(request)
    await response.write_eof()
    left = MAX_BYTES if (request.content_length or 0) <= MAX_BYTES else 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0 and not request.content.at_eof():
                left -= len(await request.content.readany())
    if left <= 0:
        await asyncio.sleep(_FAREWELL_S)


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
    """Of OpenAI's API; valid until `solve` returns."""
    api_key: str
    model: str = MODEL


Solve = Callable[[Task], Awaitable[float | None] | float | None]


def openai_agent(
    *,
    solve: str,
    tokenizer: str,
    host: str = "127.0.0.1",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    rollout_stop: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> AgentLoop:
    """The factory for `task.agent`.

    Args:
        solve: dotted path of a function that gets a `Task`, does the work, and returns a reward on top of that of the
            reward function, or None. A plain function runs in a thread, so it may block.
        tokenizer: directory or hub name, with a chat template.
        host: address that agents reach the policy at: of this machine, or "auto" for the one that other hosts see.
        chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
        rollout_stop: `rollout.stop`; the agent does not see these texts.
        trust_remote_code: run Python code that comes with the tokenizer.

    Raises:
        PluginError: `solve` does not import.
        ValueError: it is no function, the tokenizer has no chat template that can be used, or `host` is no address.
    """
    function = load(solve, what="agent")
    if not callable(function):
        raise ValueError(f"solve must be the path of a function, got {solve}, a {type(function).__name__}")
    template = ChatTemplateRenderer(load_tokenizer(tokenizer, trust_remote_code=trust_remote_code))
    return OpenAiLoop(
        cast("Solve", function),
        template=template,
        host=reachable_host() if host == "auto" else _checked_address(host),
        variables=dict(chat_template_kwargs or {}),
        stop=rollout_stop,
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
    """Runs `solve` for one trajectory after another, with a server that the first one starts."""

    def __init__(
        self,
        solve: Solve,
        *,
        template: ChatTemplateRenderer,
        host: str = "127.0.0.1",
        variables: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self._solve, self._template, self._stop = solve, template, stop
        self._server = Server(host, variables or {})
        self._threads = UserThreads("agent")

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        session = Session(
            prompt,
            max_tokens,
            generate=generate,
            template=self._template,
            stop=self._stop,
            give_up=lambda: limit.reschedule(loop.time()),
        )
        reward = None
        try:
            async with limit, self._server.open(session) as (base_url, api_key):
                reward = await self._solved(
                    Task(
                        prompt=prompt.text,
                        messages=prompt.messages or ({"role": "user", "content": prompt.text},),
                        answer=prompt.answer,
                        metadata=prompt.metadata,
                        base_url=base_url,
                        api_key=api_key,
                    )
                )
        except Exception:
            # Where the policy could not respond any more, most agents raise; that is no failure of theirs.
            if session.failure is None and _status(session) == "completed":
                raise
        if session.failure is not None:
            raise session.failure
        status = _status(session)
        return Trajectory.of_turns(_rewarded(session.turns(), reward, status=status), status=status)

    async def close(self) -> None:
        """Stops the server. Does not wait for agents that still run in threads."""
        await self._server.close()
        self._threads.close()

    async def _solved(self, task: Task) -> float | None:
        if inspect.iscoroutinefunction(self._solve):
            return await self._solve(task)
        result = await self._threads.run(self._solve, task)
        return await result if inspect.isawaitable(result) else result


def _status(session: Session) -> TrajectoryStatus:
    if session.ran_out_of_time:
        return "failed"
    return "truncated" if session.ran_out_of_room else "completed"


def _rewarded(turns: tuple[Turn, ...], reward: float | None, *, status: TrajectoryStatus) -> tuple[Turn, ...]:
    """With the agent's reward at the last turn in which the policy spoke."""
    last = max((number for number, turn in enumerate(turns) if turn.is_generated.any()), default=None)
    if last is None and status == "completed":
        raise AgentError("solve returned, and the policy has said nothing; call it at task.base_url")
    if reward is None:
        return turns
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise AgentError(f"solve must return a finite number or None, got {reward!r}")
    if last is None:
        return turns
    return (*turns[:last], replace(turns[last], reward=float(reward)), *turns[last + 1 :])
