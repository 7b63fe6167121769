"""The asking end of the control plane: one line to one `ControlServer`, blocking or in an event loop.

`Conversation` holds what both need: sessions, sequence numbers, signatures, and which frame answers which question. It
neither waits nor knows a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from weight_sync.control import (
    ANSWER,
    MAX_RESPONSE_BYTES,
    QUESTION,
    Answer,
    Envelope,
    Hello,
    Membership,
    Refused,
    Request,
    Response,
    Welcome,
)
from weight_sync.errors import PublisherLost, WeightSyncError
from weight_sync.wire import decode, make_error

RETRY_S = 1.0
CHECK_S = 0.05
"""Between two looks at whether the answer is still wanted."""
R = TypeVar("R")
Clock = Callable[[], float]
Check = Callable[[], None]


class Conversation:
    """Frames of one asker. Not thread-safe."""

    def __init__(self, membership: Membership, sender: str) -> None:
        self._membership = membership
        self._sender = sender
        self._session = b""
        self._seq = 0
        self._num_requests = 0

    @property
    def is_greeted(self) -> bool:
        return bool(self._session)

    def next_request(self) -> int:
        """An id for a new question; its retries keep it."""
        self._num_requests += 1
        return self._num_requests

    def frame(self, request: Request, request_id: int) -> bytes:
        self._seq += 1
        envelope = Envelope(
            run_id=self._membership.run_id,
            epoch=self._membership.epoch,
            sender=self._sender,
            session=self._session,
            seq=self._seq,
            request_id=request_id,
            request=request,
        )
        return self._membership.seal(QUESTION, msgspec.msgpack.encode(envelope))

    def response_in(self, frame: bytes, request: Request, request_id: int) -> Response | None:
        """What `frame` answers to this question; None if it is forged, damaged or answers an earlier one."""
        payload = self._membership.open(ANSWER, frame)
        if payload is None:
            return None
        answer = decode(payload, Answer)
        expected = request.nonce if isinstance(request, Hello) else self._session
        if answer.session != expected or answer.request_id != request_id:
            return None
        return answer.response

    def hello(self) -> Hello:
        return Hello(nonce=secrets.token_bytes(16))

    def greeted(self, response: Response, endpoint: str) -> None:
        self._session = checked(response, Welcome, endpoint).session


def checked(response: Response, kind: type[R], endpoint: str) -> R:
    """
    Raises:
        WeightSyncError: (its subclass) the server refused, or answered something else than `kind`.
    """
    if isinstance(response, Refused):
        raise make_error(response.error, response.message)
    if not isinstance(response, kind):
        raise WeightSyncError(f"{endpoint} answered {type(response).__name__}, wanted {kind.__name__}")
    return response


def connected(socket: Any, endpoint: str, membership: Membership) -> None:
    """Set up a DEALER as every line has it. Its own key is new: whoever knows the server's belongs to the run."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, membership.server_keys()[0])
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_RESPONSE_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.connect(endpoint)


class ControlClient:
    """One receiver's line to one publisher. Says hello with its first question. Safe to use from several threads, which
    then wait for each other."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        membership: Membership,
        sender: str,
        clock: Clock = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self._clock = clock
        self._lock = threading.Lock()
        self._talk = Conversation(membership, sender)
        self._dealer = context.socket(zmq.DEALER)
        connected(self._dealer, endpoint, membership)

    def ask(self, request: Request, kind: type[R], *, deadline_s: float, check: Check | None = None) -> R:
        """The publisher's answer, of type `kind`.

        Args:
            check: called while there is no answer; may raise to stop waiting.

        Raises:
            PublisherLost: no answer within `deadline_s`.
            WeightSyncError: (its subclass) the publisher refused.
        """
        give_up = self._clock() + deadline_s
        with self._lock:
            self._greet(give_up, deadline_s, check)
            return checked(self._exchange(request, give_up, deadline_s, check), kind, self.endpoint)

    def hello(self, *, deadline_s: float) -> None:
        """Open the session, if it is not open.

        Raises:
            PublisherLost: no answer within `deadline_s`: dead, unreachable, or it does not share our secret.
            StaleEpoch: it serves another run or epoch.
        """
        with self._lock:
            self._greet(self._clock() + deadline_s, deadline_s, None)

    def close(self) -> None:
        """Hang up. Waits for a question in flight, which has a deadline."""
        with self._lock:
            self._dealer.close(0)

    def _greet(self, give_up: float, deadline_s: float, check: Check | None) -> None:
        if not self._talk.is_greeted:
            self._talk.greeted(self._exchange(self._talk.hello(), give_up, deadline_s, check), self.endpoint)

    def _exchange(self, request: Request, give_up: float, deadline_s: float, check: Check | None) -> Response:
        request_id = self._talk.next_request()
        # A hello is not repeated: under one nonce it would be a replay, and TCP does not lose it.
        retry_s = deadline_s if isinstance(request, Hello) else RETRY_S
        while (left_s := give_up - self._clock()) > 0:
            # A full queue means a dead publisher: nothing to do here, the deadline of the caller speaks.
            with contextlib.suppress(zmq.Again):
                self._dealer.send(self._talk.frame(request, request_id), zmq.NOBLOCK)
            response = self._receive(request, request_id, min(retry_s, left_s), check)
            if response is not None:
                return response
        raise _lost(self.endpoint, request, deadline_s)

    def _receive(self, request: Request, request_id: int, timeout_s: float, check: Check | None) -> Response | None:
        """The answer to `request_id`; late answers to earlier questions are thrown away."""
        until = self._clock() + timeout_s
        while (left_s := until - self._clock()) > 0:
            if check is not None:
                check()
                left_s = min(left_s, CHECK_S)
            if not self._dealer.poll(max(1, int(left_s * 1000))):
                continue
            response = self._talk.response_in(self._dealer.recv(), request, request_id)
            if response is not None:
                return response
        return None


class AsyncControlClient:
    """The same line in an event loop: the coordinator's to one engine worker. One question at a time."""

    def __init__(
        self,
        endpoint: str,
        *,
        membership: Membership,
        sender: str,
    ) -> None:
        self.endpoint = endpoint
        self._talk = Conversation(membership, sender)
        self._lock = asyncio.Lock()
        # The process's own context: one of ours, if nobody closes it, would wait for its sockets when it is collected.
        self._dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        connected(self._dealer, endpoint, membership)

    async def ask(self, request: Request, kind: type[R], *, deadline_s: float) -> R:
        """
        Raises:
            TimeoutError: no answer within `deadline_s`.
            WeightSyncError: (its subclass) the worker refused.
        """
        try:
            async with asyncio.timeout(deadline_s), self._lock:
                if not self._talk.is_greeted:
                    self._talk.greeted(await self._exchange(self._talk.hello()), self.endpoint)
                return checked(await self._exchange(request), kind, self.endpoint)
        except TimeoutError as error:
            raise TimeoutError(
                f"worker {self.endpoint} did not answer {type(request).__name__} within {deadline_s:.1f} s; its "
                "process is dead, stopped or unreachable, or weight_sync.timeout_s is too short"
            ) from error

    def close(self) -> None:
        self._dealer.close(0)

    async def _exchange(self, request: Request) -> Response:
        request_id = self._talk.next_request()
        retry_s = None if isinstance(request, Hello) else RETRY_S
        while True:
            await self._dealer.send(self._talk.frame(request, request_id))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_s):
                    while True:
                        frame = await self._dealer.recv()
                        response = self._talk.response_in(frame, request, request_id)
                        if response is not None:
                            return response


def _lost(endpoint: str, request: Request, deadline_s: float) -> PublisherLost:
    return PublisherLost(
        f"publisher {endpoint} did not answer {type(request).__name__} within {deadline_s:.1f} s; "
        "its process is dead, stopped or unreachable"
    )
