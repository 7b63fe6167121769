"""The HTTP side of OpenAI's chat-completions API: one server per rollout worker, one address per trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING

from aiohttp import web

from rollout.agent.openai_api import MODEL, ApiError, events, parse_request, response
from rollout.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from aiohttp.typedefs import Handler

    from rollout.agent.openai_session import Session

log = logging.getLogger(__name__)
MOST_BYTES = 64 << 20
"""Of a request: a conversation of a million tokens, with room to spare."""
_LINGER_S, _FAREWELL_S = 10.0, 1.0
"""For a body that nobody needs; between an answer and the end of a connection with more in it than is read."""
_BACKLOG = 4096
"""Connections that may wait to be accepted: groups begin together, and with them their agents."""


class Server:
    """Answers for the sessions that are open. Starts with the first one, and listens until it is closed.

    Args:
        host: address to listen on, and to tell agents.
        variables: of the chat template.
    """

    def __init__(self, host: str, variables: Mapping[str, object]) -> None:
        self._host, self._variables = host, variables
        self._sessions: dict[str, Session] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._told: set[str] = set()

    @contextlib.asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """Base URL and API key that the session answers at while the block runs; neither can be guessed.

        Raises:
            AgentError: the server cannot listen. The next session tries again.
        """
        port = await self._port()
        # Only who was told may speak for a trajectory. What is sampled does not depend on it.
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

    async def _port(self) -> int:
        async with self._starting:
            if self._runner is None:
                self._runner = await self._started()
            return self._runner.addresses[0][1]

    async def _started(self) -> web.AppRunner:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[_errors])
        app.router.add_post("/{key}/v1/chat/completions", self._chat)
        app.router.add_get("/{key}/v1/models", self._models)
        # A client that goes away ends its generation.
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, lingering_time=0.0
        )
        is_listening = False
        try:
            await runner.setup()
            await web.TCPSite(runner, self._host, 0, backlog=_BACKLOG).start()
            is_listening = True
        except OSError as error:
            do = 'set host in task.agent_args to "auto", or to an address of this machine'
            raise AgentError(f"the policy cannot be reached at {self._host}: {error}; {do}") from error
        finally:
            if not is_listening:
                await runner.cleanup()
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
        self._tell_ignored(asked.ignored)
        answer = await session.answer(asked)
        created, response_id = int(time.time()), f"chatcmpl-{secrets.token_hex(8)}"
        if not asked.stream:
            return web.json_response(response(answer, response_id=response_id, created=created))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        lines = events(answer, response_id=response_id, created=created, include_usage=asked.include_usage)
        await stream.write("".join(lines).encode())
        await stream.write_eof()
        return stream

    def _tell_ignored(self, ignored: Mapping[str, object]) -> None:
        """Once per name."""
        for name in sorted(ignored.keys() - self._told):
            log.warning(
                "an agent asks for %s=%.100r, which changes nothing; the run says how the policy samples",
                name, ignored[name],
            )  # fmt: skip
            self._told.add(name)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in OpenAI's form, and with no status that clients try again for."""
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        what = f"{request.method} /{request.path.partition('/v1/')[2]}: {error.reason}"
        message = f"{what}; there are POST /chat/completions, of {MOST_BYTES >> 20} MiB at most, and GET /models"
        failure = ApiError(message, status=error.status, code="not_found")
    except Exception as error:  # noqa: BLE001 - the edge: what an engine raised ends the trajectory, and is raised there
        log.warning("a request of an agent failed: %s: %s", type(error).__name__, error)
        failure = ApiError(f"{type(error).__name__}: {error}", code="engine_error")
    answer = web.json_response(failure.body(), status=failure.status)
    if request.can_read_body:
        await _answer_early(request, answer)
    return answer


async def _answer_early(request: web.Request, answer: web.StreamResponse) -> None:
    """Sends the answer to a request whose body is not read yet. The connection is closed behind it.

    Most clients read an answer when they have sent everything, so a body of a size that is allowed is read and thrown
    away. A larger one is not read any further; its client has a moment for the answer before its connection breaks.
    """
    answer.force_close()
    await answer.prepare(request)
    await answer.write_eof()
    left = MOST_BYTES if (request.content_length or 0) <= MOST_BYTES else 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0 and not request.content.at_eof():
                left -= len(await request.content.readany())
    if left <= 0:
        await asyncio.sleep(_FAREWELL_S)
