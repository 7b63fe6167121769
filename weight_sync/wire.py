"""What publisher, receiver and coordinator say to each other through their hosts' calls (actor calls, worker RPC).

Hosts pass these as opaque bytes: msgpack of a typed struct, so a host never needs the types, and an error keeps its own
type on its way through layers that would flatten it into a string (vLLM's RPC does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from weight_sync import errors
from weight_sync.decoding import decode_typed
from weight_sync.device.base import IpcHandle  # noqa: TC001 - msgspec reads the annotations
from weight_sync.types import ParamMeta, RelayHandle, ShardDesc  # noqa: TC001 - likewise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CommitMode = Literal["auto", "staged", "inplace"]
T = TypeVar("T")


class PublisherLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one learner rank holds."""

    rank: int
    params: tuple[ParamMeta, ...]
    shards: tuple[ShardDesc, ...]


class ArenaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Where the slots of a publisher lie: slot `i` covers bytes `[i * slot_stride, i * slot_stride + slot_bytes)`."""

    transport: str
    handle: IpcHandle | None
    """None if the rank publishes nothing (all its shards are empty)."""
    slot_bytes: int
    slot_stride: int
    num_slots: int
    host: str = ""
    """Address under which a two-sided transport reaches the publisher; empty for transports that map memory."""
    device: str = ""
    """What tells the publisher's device from every other one, where that is known."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What everyone who takes part in an epoch is told."""

    run_id: str
    secret: bytes
    """Authenticates every control frame of the run. Never printed."""
    epoch: int
    manifest: bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id!r}, epoch={self.epoch}, manifest={len(self.manifest)} bytes)"


class OpenPublisher(Opening, frozen=True, kw_only=True):
    """Opens an epoch on a learner rank."""

    transport: str
    num_slots: int
    verify: bool
    host: str | None
    """Address the control socket binds; None takes the one that other nodes reach. The port is ephemeral, returned."""


class PublisherInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach an opened publisher."""

    rank: int
    node: str
    """Parties that name the same node can map each other's memory."""
    endpoint: str
    arenas: tuple[ArenaHandle, ...]
    """The same slots by every way they can be read, best first."""
    manifest_digest: str
    probe_bytes: int
    """The page behind the last slot holds a pattern of this size, ..."""
    probe_digest: int
    """... with this digest."""


class OpenReceiver(Opening, frozen=True, kw_only=True):
    """Opens an epoch on the workers of one replica."""

    replica: str
    commit: CommitMode
    verify: bool
    publishers: tuple[PublisherInfo, ...]
    deadline_s: float
    """For mapping and probing."""
    host: str | None
    """As in `OpenPublisher`."""
    relay: bool
    """Offer what arrives here to other replicas of this node."""
    lease_s: float = 10.0
    """A lease is renewed at half this time while a pull goes on, and frees its slot if the receiver dies."""


class ReceiverInfo(msgspec.Struct, frozen=True, kw_only=True):
    worker: int
    node: str
    manifest_digest: str
    commit: Literal["staged", "inplace"]
    shadow_bytes: int
    pull_bytes: int
    probe_s: float
    """Seconds to open every arena and pull its probe pattern."""
    endpoint: str
    """Where the worker's own control thread listens."""
    transports: dict[int, str]
    """Learner rank -> how its slots are read."""
    reasons: tuple[str, ...]
    """Why a better way is not used, if so."""
    relay: RelayHandle | None
    """How others read from this worker; None if they cannot."""


class BakeRequest(msgspec.Struct, frozen=True, kw_only=True):
    params: tuple[ParamMeta, ...]


class PackReport(msgspec.Struct, frozen=True, kw_only=True):
    """What publishing one version cost a learner rank."""

    rank: int
    version: int
    slot: int
    nbytes: int
    wait_s: float
    """Waiting for a free slot."""
    pack_s: float
    counters: dict[str, int]


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """What bringing one version into a worker cost. Also the report of a commit; phases that did not run are 0."""

    worker: int
    version: int
    lease_s: float
    """From the request for the version until its first byte could be read."""
    seal_s: float
    """The slowest learner's digest and seal of this version."""
    pull_s: float
    pull_by_source: dict[int, float]
    """Learner rank -> seconds."""
    attest_s: float
    commit_s: float
    nbytes: int
    num_runs: int
    num_retries: int
    """Sources pulled a second time because a digest differed."""
    num_stalls: int
    """Sources whose predecessor in a relay fell silent, so that the learner gave the rest."""
    counters: dict[str, int]


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    worker: int
    open: bool
    live_version: int | None
    dirty: bool
    prefetching: bool
    counters: dict[str, int]


class RunDigests(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of runs, keyed by source rank, in the order of the worker's plan."""

    version: int | None
    by_rank: dict[int, tuple[int, ...]]


class PublishedDigests(msgspec.Struct, frozen=True, kw_only=True):
    """A learner rank's digests for every worker's runs, in the order of that worker's plan."""

    rank: int
    version: int
    by_worker: dict[int, tuple[int, ...]]


class ReadBack(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of engine parameters as they are now."""

    params: dict[str, bytes]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's answer to a worker call."""

    ok: bool
    value: bytes = b""
    error: str = ""
    """Type name of the exception."""
    message: str = ""
    dirty: bool = False
    """The worker's parameters are a mixture of versions: it must not generate."""


class CommitResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica's `commit` gives back: one reply per worker, and what it cost generation."""

    results: list[bytes]
    pause_s: float
    """Generation stood still: from the end of the step under way until the engine went on."""
    drain_s: float = 0.0
    """Before that: from the request to pause until that step had ended. Its tokens count."""
    resume_s: float = 0.0
    """Of the pause: from the workers' answers until the engine went on."""


def encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Typed decode.

    Raises:
        PlanMismatch: the bytes are not a `kind`; the parties run different versions of this package.
    """
    try:
        return decode_typed(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.PlanMismatch(
            f"message is not a {kind.__name__}: {error}; learner and engine must run the same version of weight_sync"
        ) from error


def answer(call: Callable[[], bytes], *, is_dirty: Callable[[], bool]) -> bytes:
    """Run `call` and wrap its result, or its exception with type and message, as a `Reply`."""
    try:
        return encode(Reply(ok=True, value=call(), dirty=is_dirty()))
    except Exception as error:  # noqa: BLE001 - the edge of the engine's RPC, which would flatten it into a string
        return encode(Reply(ok=False, error=type(error).__name__, message=str(error), dirty=is_dirty()))


def make_error(name: str, message: str) -> Exception:
    """An exception of the type called `name` if it is one of ours, else `WeightSyncError` naming it."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.WeightSyncError):
        return kind(message)
    return errors.WeightSyncError(f"{name}: {message}")


def open_reply(data: bytes, kind: type[T], *, party: str) -> T:
    """The value of a worker's reply.

    Raises:
        WeightSyncError: (or its subclass) what the worker raised, prefixed with `party`.
    """
    reply = decode(data, Reply)
    if not reply.ok:
        raise make_error(reply.error, f"{party}: {reply.message}")
    return decode(reply.value, kind)


def reply_state(results: Sequence[bytes]) -> Literal["ok", "failed", "dirty"]:
    """What a replica's host must know of its workers' replies to a commit: `dirty` means it must not generate.

    Workers of which some took the version and some did not are a mixture too.
    """
    replies = [decode(result, Reply) for result in results]
    num_ok = sum(reply.ok for reply in replies)
    if any(reply.dirty for reply in replies) or 0 < num_ok < len(replies):
        return "dirty"
    return "ok" if num_ok else "failed"
