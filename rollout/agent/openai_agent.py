"""Any agent that uses OpenAI's API: each trajectory gets an address where the policy responds."""

from __future__ import annotations

import asyncio
import contextlib
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

from rollout.agent.openai_protocol import MODEL, ApiError, ignored_fields, parse_request
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
    from rollout.types import Prompt, Turn


log = logging.getLogger(__name__)
MAX_BYTES = 64 << 20
"""Of a request: a conversation of a million tokens, with room to spare."""
_LINGER_S = 10.0
"""To read a body that is not needed."""
_FAREWELL_S = 1.0
"""Between a response and the end of a connection with an unread body."""
_BACKLOG = 4096
"""Connections that may wait to be accepted: the agents of a group start together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent gets: one row of the data set, and the address of the policy.

    Example:
        client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        await client.chat.completions.create(model=task.model, messages=list(task.messages))
    """

    prompt: str
    """Text of the prompt; after the chat template, if it went through one."""
    messages: Sequence[Mapping[str, Any]]
    """The same as chat messages; without a chat template, `prompt` as one message of the user."""
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
        host: address of this machine where agents reach the policy, or "auto" for the one that other hosts see.
        chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
        rollout_stop: `rollout.stop`; the agent does not see these texts.
        trust_remote_code: run Python code that comes with the tokenizer.

    Raises:
        PluginError: `solve` does not import.
        ValueError: it is no function, the chat template is missing or unusable, or `host` is no address.
    """
    function = load(solve, what="agent")
    if not callable(function):
        raise ValueError(f"solve must be the path of a function, got {solve}, a {type(function).__name__}")
    return OpenAiLoop(
        cast("Solve", function),
        template=ChatTemplateRenderer(load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)),
        host=reachable_host() if host == "auto" else _checked_address(host),
        variables=chat_template_kwargs,
        stop=rollout_stop,
    )


def _checked_address(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(f'host must be "auto" or an IPv4 or IPv6 address, got {host!r}') from error
    if address.is_unspecified:
        raise ValueError(
            f'host must be an address that agents can connect to, got {host!r}, which means any address; use "auto"'
        )
    return str(address)


class OpenAiLoop:
    """Runs `solve` for any number of trajectories. They share a server, which the first one starts; it listens until
    `close`.

    Args:
        host: address to listen on, and to give to agents.
        variables: of the chat template.
        stop: see `openai_agent`.
    """

    def __init__(
        self,
        solve: Solve,
        *,
        template: ChatTemplateRenderer,
        host: str = "127.0.0.1",
        variables: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self._solve, self._template, self._host, self._stop = solve, template, host, stop
        self._variables = dict(variables or {})
        self._threads = UserThreads("agent")
        self._sessions: dict[str, Session] = {}
        self._starting = asyncio.Lock()
        self._server: web.AppRunner | None = None
        self._logged: set[str] = set()

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
            async with limit, self._open(session) as (base_url, api_key):
                task = Task(
                    prompt=prompt.text,
                    messages=prompt.messages or ({"role": "user", "content": prompt.text},),
                    answer=prompt.answer,
                    metadata=prompt.metadata,
                    base_url=base_url,
                    api_key=api_key,
                )
                reward = await self._threads.call(self._solve, task)
        except Exception:
            # Once the policy cannot respond any more, most agents raise; that is no failure of theirs.
            if session.failure is None and session.status == "completed":
                raise
        if session.failure is not None:
            raise session.failure
        status, turns = session.status, session.turns()
        last = max((number for number, turn in enumerate(turns) if turn.is_generated.any()), default=None)
        if last is None and status == "completed":
            raise AgentError("solve returned without a response of the policy; send requests to task.base_url")
        return Trajectory.of_turns(_rewarded(turns, last, reward), status=status)

    async def close(self) -> None:
        """Stops the server. Does not wait for agents that still run in threads."""
        server, self._server = self._server, None
        if server is not None:
            await server.cleanup()
        self._threads.close()

    @contextlib.asynccontextmanager
    async def _open(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """Base URL and API key of the session while the block runs; neither can be guessed.

        Raises:
            AgentError: the server cannot listen. The next session tries again.
        """
        async with self._starting:
            if self._server is None:
                self._server = await self._started()
        port = self._server.addresses[0][1]
        # Only the holder of the key may speak for a trajectory. What is sampled does not depend on it.
        key = secrets.token_urlsafe(18)
        self._sessions[key] = session
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield f"http://{host}:{port}/{key}/v1", key
        finally:
            del self._sessions[key]
            await session.close()

    async def _started(self) -> web.AppRunner:
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[_errors])
        app.router.add_post("/{key}/v1/chat/completions", self._chat)
        app.router.add_get("/{key}/v1/models", self._models)
        # A client that goes away ends its generation.
        server = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, lingering_time=0.0
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(server.cleanup)
            try:
                await server.setup()
                await web.TCPSite(server, self._host, 0, backlog=_BACKLOG).start()
            except OSError as error:
                do = 'set host in task.agent_args to "auto", or to an address of this machine'
                raise AgentError(f"the policy cannot be reached at {self._host}: {error}; {do}") from error
            undo.pop_all()
        return server

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
            raise ApiError(f"the body is not JSON: {error}") from error
        asked = parse_request(body, self._variables)
        for name, value in ignored_fields(body).items():
            if name not in self._logged:
                self._logged.add(name)
                log.warning(
                    "ignored %s=%.100r in a request of an agent: the run sets how the policy samples", name, value
                )
        response = await session.respond(asked)
        head = {"created": int(time.time()), "response_id": f"chatcmpl-{secrets.token_hex(8)}"}
        if not asked.stream:
            return web.json_response(response.body(**head))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        options = asked.stream_options
        include_usage = options is not None and bool(options.include_usage)
        await stream.write(response.events(**head, include_usage=include_usage).encode())
        await stream.write_eof()
        return stream


def _rewarded(turns: tuple[Turn, ...], last: int | None, reward: object) -> tuple[Turn, ...]:
    """With the agent's reward at turn `last`, if there is one."""
    if reward is None:
        return turns
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise AgentError(f"solve must return a finite number or None, got {reward!r}")
    return tuple(replace(turn, reward=float(reward)) if number == last else turn for number, turn in enumerate(turns))


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in OpenAI's form, with a status that clients do not retry."""
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

    Most clients read a response only after they have sent everything, so a body of an allowed size is read and
    dropped. A larger one is not; its client has a moment for the response before its connection breaks.
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
