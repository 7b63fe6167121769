"""A receiver behind the calls that an engine's host can forward: bytes in, bytes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.messages import OpenReceiver, RecordedLayout, RecordRequest, answer, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from weight_sync.receive.receiver import WeightReceiver


class WorkerService:
    """Forwards to a receiver, which is made with the first call so that a failure to make it is answered too."""

    def __init__(self, make_receiver: Callable[[], WeightReceiver]) -> None:
        self._make_receiver = make_receiver
        self._receivers: list[WeightReceiver] = []

    def record(self, request: bytes) -> bytes:
        """`RecordRequest` -> `RecordedLayout`."""
        ask = decode(request, RecordRequest)
        return self._answer(lambda receiver: RecordedLayout.of(receiver.record(ask.params), is_whole=ask.is_whole))

    def open(self, request: bytes) -> bytes:
        """`OpenReceiver` -> `ReceiverInfo`."""
        return self._answer(lambda receiver: receiver.open(decode(request, OpenReceiver)))

    def commit(self, version: int, deadline_s: float) -> bytes:
        """Make a version live -> `PullReport`. The engine must be paused."""
        return self._answer(lambda receiver: receiver.commit(version, deadline_s=deadline_s))

    def invalidate(self) -> bytes:
        """The parameters hold no version any more."""
        return self._answer(lambda receiver: receiver.invalidate())

    def digests(self) -> bytes:
        """`RunDigests` of the live parameters."""
        return self._answer(lambda receiver: receiver.parameter_digests())

    def status(self) -> bytes:
        """`WorkerStatus`."""
        return self._answer(lambda receiver: receiver.status())

    def close(self) -> bytes:
        """Unmap and hang up; the weights stay."""
        return self._answer(lambda receiver: receiver.close())

    def _answer(self, call: Callable[[WeightReceiver], object]) -> bytes:
        return answer(lambda: encode(call(self._receiver())), is_dirty=lambda: any(r.is_dirty for r in self._receivers))

    def _receiver(self) -> WeightReceiver:
        if not self._receivers:
            self._receivers.append(self._make_receiver())
        return self._receivers[0]
