"""Every message between driver, learners and engine workers: set-up requests, control requests and their replies.

Hosts pass these as opaque bytes: msgpack of a typed struct, so a host never needs the types, and an error keeps its own
type on its way through layers that would flatten it into a string (vLLM's RPC does).
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from weight_sync import errors
from weight_sync.device.base import IpcHandle  # noqa: TC001 - msgspec reads the annotations
from weight_sync.plan.routes import Stage  # noqa: TC001 - likewise
from weight_sync.plan.types import ParamMeta, Table, Version, WorkerLayout  # noqa: TC001 - likewise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


T = TypeVar("T")

_building = threading.Lock()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def decode_typed(data: bytes, kind: type[T]) -> T:
    """`data` as a `kind`, safe in any thread.

    Raises:
        msgspec.DecodeError: not msgpack, or not of this type.
        UnicodeDecodeError: a text in it is not UTF-8.
        RecursionError: nested too deep.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _building:
            decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder.decode(data)


CommitMode = Literal["auto", "staged", "inplace"]


class PublisherLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one learner rank holds."""

    rank: int
    params: tuple[ParamMeta, ...]
    """Of the whole model, from rank 0; empty from the others."""
    params_digest: bytes
    """sha256 of them, from every rank."""
    shards: Table
    """`RankShards.to_table`."""


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


class RunKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The run, and the CURVE key pair (Z85) by which its parties know each other. Made once per run by the coordinator;
    travels inside the set-up calls alone, never in a log, a file or an environment variable."""

    run_id: str
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"RunKeys(run_id={self.run_id!r})"


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a control server listens, and the key that proves it is that server."""

    endpoint: str
    public_key: bytes


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What everyone who takes part in an epoch receives."""

    keys: RunKeys
    epoch: int
    plan: bytes
    """`plan.agreement` opens it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run={self.keys.run_id!r}, epoch={self.epoch}, {len(self.plan)} bytes of plan)"


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
    address: PeerAddress
    arenas: tuple[ArenaHandle, ...]
    """The same slots by every way they can be read, best first."""
    plan_root: str
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


class ReceiverInfo(msgspec.Struct, frozen=True, kw_only=True):
    worker: int
    node: str
    plan_root: str
    commit: Literal["staged", "inplace"]
    staging_bytes: int
    pull_bytes: int
    address: PeerAddress
    """Of the worker's own control thread."""
    transports: dict[int, str]
    """Learner rank -> how its slots are read."""
    reasons: tuple[str, ...]
    """Why a better way is not used, if so."""
    relay: RelayHandle | None
    """How others read from this worker; None if they cannot."""


class RecordRequest(msgspec.Struct, frozen=True, kw_only=True):
    params: tuple[ParamMeta, ...]
    is_whole: bool = True
    """Answer with the layout; else its digest will do, which is to equal that of another replica."""


class RecordedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's loader did."""

    digest: bytes
    layout: WorkerLayout | None

    @classmethod
    def of(cls, layout: WorkerLayout, *, is_whole: bool) -> RecordedLayout:
        return cls(digest=hashlib.sha256(encode(layout)).digest(), layout=layout if is_whole else None)


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
    pull_s: float = 0.0
    pull_by_source: dict[int, float] = {}
    """Learner rank -> seconds of its read, and of the second one where a digest differed."""
    attest_s: float = 0.0
    commit_s: float = 0.0
    nbytes: int = 0
    skipped_bytes: int = 0
    """Of `nbytes`, those that were not read, because they are what they were in the version before."""
    num_runs: int = 0
    num_retries: int = 0
    """Sources pulled a second time because a digest differed."""
    num_stalls: int = 0
    """Sources whose predecessor in a relay fell silent, so that the learner gave the rest."""
    counters: dict[str, int] = {}


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    worker: int
    open: bool
    live_version: int | None
    dirty: bool
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


class ReplicaTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one version did to one replica, and when. Seconds; times of workers are those of the slowest."""

    is_staged: bool
    """Pulled beside generation; else in the pause."""
    pull_at_s: float
    """From the request to sync until the first byte could be read."""
    pull_s: float
    attest_s: float
    live_at_s: float
    """From the request to sync until the replica went on with the version; the pause ends here."""
    drain_s: float
    pause_s: float


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one version cost on its way to the engines. Times in seconds, of the slowest party."""

    version: Version
    pack_s: float
    """What the learner waited for."""
    seal_s: float
    """Digests of the packed bytes, beside training."""
    pin_s: float
    """From the request for the version until its first byte could be read: mostly the wait for the seal."""
    pull_s: float
    pull_by_source: dict[int, float]
    """Learner rank -> slowest pull from it."""
    pull_bytes_per_s: float
    """Of the slowest worker."""
    attest_s: float
    drain_s: float
    """From asking an engine to pause until the step under way had ended."""
    pause_s: float
    """Longest time any replica stood still."""
    commit_s: float
    resume_s: float
    """At the end of the pause: from the workers' answers until the engine went on."""
    end_to_end_s: float
    """From the request to sync until the last replica was live."""
    nbytes: int
    skipped_bytes: int = 0
    """Of `nbytes`, those that were not read, because they are what they were in the version before."""
    num_runs: int
    num_retries: int
    num_stalls: int
    """Sources that a replica could not read from another one as planned."""
    version_lag: int
    """This version minus the oldest that a live replica generates with at the end of the sync."""
    replicas_live: int
    replicas_skipped: int
    counters: dict[str, int]
    """Allocations, registrations, sockets, ... since the epoch opened; must not grow after the first sync."""
    replicas: dict[str, ReplicaTimes]
    """By name, of the replicas that took the version."""


class RelayHandle(msgspec.Struct, frozen=True, kw_only=True):
    """How a successor reads what a receiver holds in its staging buffer: one slot."""

    owner: str
    """Name for messages, "replica/worker"."""
    node: str
    address: PeerAddress
    arenas: tuple[ArenaHandle, ...]
    """The staging buffer by every way it can be read, best first."""
    layout: str
    """Equal for two receivers exactly if their staging buffers are laid out alike."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Are you there? The control thread itself answers, whatever else the process does."""


class Pin(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="pin"):
    """From the coordinator: keep the version for so long, counted from the seal if it is not sealed yet. A repeated
    pin counts anew. Answered once the version is sealed."""

    version: int
    ttl_s: float


class Unpin(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="unpin"):
    version: int


class Check(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="check"):
    """From a receiver that has read all it needs of a slot: is that whole, and what were its digests?"""

    worker: int
    slot: int
    generation: int


class ReplicaLeft(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="replica_left"):
    """From the coordinator: free what is kept for this replica, which is closed or dead and does not come back."""

    replica: str


class SlotAt(NamedTuple):
    """Where a learner rank holds a version."""

    rank: int
    slot: int
    generation: int
    """Another one afterwards shows that the slot was packed again while it was read."""


class PrefetchRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prefetch"):
    """Bring a version. Answered once it is here and verified; in place, once the worker knows where to read it."""

    version: int
    slots: tuple[SlotAt, ...]
    """At every learner rank. Pinned until every replica of the sync has read them."""
    deadline_s: float


class LinkRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="link"):
    """From the next pull on, bring the sources in this order, and some of them from other replicas. A pull that is
    under way ends."""

    stages: tuple[Stage, ...]
    predecessors: tuple[RelayHandle, ...]
    readers: tuple[str, ...]
    """Workers that read from you."""


class AwaitRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="await"):
    """From a successor: answer once more than `position` bytes of this source's part of your staging buffer hold the
    version; at once if `position` is negative. Refused if they will not, or not any more."""

    version: int
    rank: int
    position: int


class Available(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="available"):
    position: int
    """Bytes of the source's part of the staging buffer, from its start, that hold the version and may be read."""


class Pinned(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="pinned"):
    slot: int
    generation: int
    seal_s: float
    """What digesting and sealing the version took, beside training."""


class Checked(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="checked"):
    is_intact: bool
    """The slot still is what was pinned, so what was read is whole."""
    digests: tuple[int, ...]
    """One per run of the asking worker on this rank, in plan order; empty if the run does not verify."""


class Ok(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ok"):
    """What was asked for is so."""


class TransportRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a two-sided transport asks of the process that sends."""

    group: bytes
    """A nonce: of a group of two."""


class PairMeet(TransportRequest, frozen=True, kw_only=True, tag="pair_meet"):
    """Build the group, or go on building it: what my store holds that yours may lack."""

    entries: dict[str, bytes]


class PairSend(TransportRequest, frozen=True, kw_only=True, tag="pair_send"):
    """Send these parts of a slot over the group, each as a message of its own, in this order."""

    number: int
    """Counts the orders given to this group, from 0, so that a repeated one is not carried out twice."""
    slot: int
    ranges: tuple[tuple[int, int], ...]
    """(offset in the slot, bytes)."""


class PairWatch(TransportRequest, frozen=True, kw_only=True, tag="pair_watch"):
    """How far are you, and does the group still stand?"""


class PairDrop(TransportRequest, frozen=True, kw_only=True, tag="pair_drop"):
    """Abort the group; I have left it."""


class PairMet(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="pair_met"):
    entries: dict[str, bytes]
    error: str
    """Why the group will not come about; empty while it may."""


class PairState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="pair_state"):
    num_sent: int
    """Orders carried out."""
    error: str
    """Why the group fell; empty while it stands."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="refused"):
    error: str
    message: str


TransportResponse = PairMet | PairState
Request = (
    Ping | Pin | Unpin | Check | ReplicaLeft | PrefetchRequest | LinkRequest | AwaitRequest
    | PairMeet | PairSend | PairWatch | PairDrop
)  # fmt: skip
Response = Ok | Pinned | Checked | Available | Refused | TransportResponse


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    epoch: int
    sender: str
    request_id: int
    """Of the client's choice; a repeated request keeps it."""
    request: Request


class Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    request_id: int
    response: Response
