"""How parties agree on a plan of which each knows only its own part.

    planner:  leaf = sha256(bytes of a party's part)          root = sha256(epoch, all leaves)
    party:    its own part hashes to its leaf, the leaves hash to the root; then it proves the part and answers the root

Equal roots mean equal leaves, so each party has exactly the part that the planner proved to fit all others.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from weight_sync.errors import PlanMismatch
from weight_sync.plan.checks import pack_problems, pull_problems
from weight_sync.plan.planner import check_plan, mismatch
from weight_sync.plan.types import PackPlan, PullPlan, from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from weight_sync.plan.types import ParamMeta, Plan


T = TypeVar("T")


class _Parts(msgspec.Struct, frozen=True, array_like=True):
    """What a party receives: all leaves, its own part, and perhaps those of its neighbours."""

    epoch: int
    leaves: dict[str, bytes]
    parts: dict[str, bytes]


class SharedPlan(NamedTuple):
    """A plan in parts, as the coordinator keeps it."""

    epoch: int
    root: str
    params: tuple[ParamMeta, ...]
    """With the dtypes that travel."""
    sources: Mapping[int, tuple[int, ...]]
    """Worker -> learner ranks that it reads."""
    for_learner: Mapping[int, bytes]
    for_replica: bytes
    """The parts of all workers: replicas are split alike, so this is for each of them."""

    def pull(self, worker: int) -> PullPlan:
        """
        Raises:
            PlanMismatch: there is no such worker.
        """
        return open_pull(self.for_replica, epoch=self.epoch, worker=worker)[1]


def share(plan: Plan) -> SharedPlan:
    """
    Raises:
        PlanMismatch: the plan is not consistent.
    """
    check_plan(plan)
    learners = {_learner(pack.rank): to_wire(pack) for pack in plan.pack}
    workers = {_worker(pull.worker): to_wire(pull) for pull in plan.pull}
    leaves = {name: hashlib.sha256(part).digest() for name, part in (learners | workers).items()}

    def parts(names: Collection[str]) -> bytes:
        own = {name: part for name, part in (learners | workers).items() if name in names}
        return msgspec.msgpack.encode(_Parts(plan.epoch, leaves, own))

    return SharedPlan(
        epoch=plan.epoch,
        root=_root(plan.epoch, leaves),
        params=plan.params,
        sources={pull.worker: tuple(pull.bytes_by_source) for pull in plan.pull},
        for_learner={pack.rank: parts([_learner(pack.rank)]) for pack in plan.pack},
        for_replica=parts(workers),
    )


def open_pack(data: bytes, *, epoch: int, rank: int) -> tuple[str, PackPlan]:
    """The root, and a learner rank's own part, proven.

    Raises:
        PlanMismatch: not for this epoch or rank, damaged, or inconsistent; says what.
    """
    root, plan = _open(data, epoch, _learner(rank), PackPlan)
    _require(plan.rank == rank, pack_problems(plan), _learner(rank))
    return root, plan


def open_pull(data: bytes, *, epoch: int, worker: int) -> tuple[str, PullPlan]:
    """The root, and an engine worker's own part, proven.

    Raises:
        PlanMismatch: see `open_pack`.
    """
    root, plan = _open(data, epoch, _worker(worker), PullPlan)
    _require(plan.worker == worker, pull_problems(plan), _worker(worker))
    return root, plan


def _open(data: bytes, epoch: int, party: str, kind: type[T]) -> tuple[str, T]:
    try:
        sent = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanMismatch(f"a plan of {len(data)} bytes cannot be decoded: {error}; do both sides match?") from error
    if sent.epoch != epoch:
        raise PlanMismatch(f"the plan is for epoch {sent.epoch}, not {epoch}")
    part, leaf = sent.parts.get(party), sent.leaves.get(party)
    if part is None or leaf is None:
        raise PlanMismatch(f"this is {party}, the plan has parts for {', '.join(sorted(sent.parts))}")
    if hashlib.sha256(part).digest() != leaf:
        raise PlanMismatch(f"the digest of {party}'s plan is not the one that was agreed on: it was damaged on its way")
    return _root(sent.epoch, sent.leaves), from_wire(part, kind)


def _require(is_own: bool, problems: Sequence[str], party: str) -> None:
    if not is_own or problems:
        raise mismatch(f"the plan of {party} is not consistent", problems if is_own else ["it is another party's"])


def _root(epoch: int, leaves: Mapping[str, bytes]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode((epoch, sorted(leaves.items())))).hexdigest()


def _learner(rank: int) -> str:
    return f"learner {rank}"


def _worker(worker: int) -> str:
    return f"worker {worker}"


_DECODER = msgspec.msgpack.Decoder(_Parts)
