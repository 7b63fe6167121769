"""Where weight sync's things are and what they are called: of its golden parts, the only file that a rebuild changes.

Everything here takes plain values and gives plain values back, in words that hold for any implementation: a version is
`held` in a slot, whether by leases or by pins; a plan is what it copies; an error has the name in `ERRORS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

import weight_sync
from tests.fakes.derived_engine import DerivedEngine, ToyReloader, checkpoint_params
from tests.fakes.forks import RANKS, forks
from tests.fakes.sync_world import LocalPublisher, LocalReplica, full_weights
from tests.fakes.trainer_process import ROOT
from tests.fakes.virtual_time import run_virtual
from tests.golden.clocks import logged
from tests.golden.sync_engines import PACKED, Saved
from weight_sync import errors
from weight_sync.bench.__main__ import parser as bench_parser
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.select import get_backend
from weight_sync.errors import DeviceError
from weight_sync.messages import (
    CommitResult,
    Ok,
    PackReport,
    Pinned,
    PrefetchRequest,
    PullReport,
    ReplicaTimes,
    Reply,
    SyncReport,
    Unpin,
    encode,
)
from weight_sync.plan.planner import DTYPE_BYTES, build_plan, check_plan
from weight_sync.plan.types import EngineParam, ParamMeta, RankShards, RecordedCopy, ShardBox, WorkerLayout
from weight_sync.publish.shards import local_shards
from weight_sync.publish.slots import SlotTable
from weight_sync.receive.recorder import record
from weight_sync.vllm.lora import AdapterSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from tests.golden.sync_engines import Held, LoraLinear

# Names

ERRORS = {
    "PlanMismatch": errors.PlanMismatch,
    "SlotOverwritten": errors.SlotOverwritten,
    "PullTimeout": errors.PullTimeout,
    "DigestMismatch": errors.DigestMismatch,
    "ReplicaDirty": errors.ReplicaDirty,
    "PublisherLost": errors.PublisherLost,
    "StaleEpoch": errors.StaleEpoch,
    "VersionUnavailable": errors.VersionUnavailable,
    "TransportUnusable": errors.TransportUnusable,
    "RelayStalled": errors.RelayStalled,
    "WeightSyncError": errors.WeightSyncError,
    "DeviceError": DeviceError,
}
"""Golden name -> the class that says so."""
PUBLIC = {
    "coordinator": "SyncCoordinator",
    "options": "SyncOptions",
    "report": "SyncReport",
    "publisher": "WeightPublisher",
    "receiver": "WeightReceiver",
    "service of a worker": "WorkerService",
    "handle of a publisher": "PublisherHandle",
    "handle of a replica": "ReplicaHandle",
    "replica in vLLM": "AsyncLLMReplica",
    "extension of vLLM": "EXTENSION",
    "version of vLLM is refused": "UnsupportedVllm",
    "result of a commit": "CommitResult",
    "state of replies": "reply_state",
    "backend": "get_backend",
    "shards of a model": "local_shards",
}
"""Role -> public name."""


def told(error: BaseException) -> list[str]:
    """[golden name, text] of an error; what differs from run to run is left out."""
    kind = next((name for name, known in ERRORS.items() if type(error) is known), type(error).__name__)
    return [kind, plain_text(str(error))]


def plain_text(text: str) -> str:
    patterns = {
        r"127\.0\.0\.1:\d+": "ADDRESS",
        r"0x[0-9a-f]+|\b[0-9a-f]{12,64}\b": "HEX",
        r"public names: .*": "public names: NAMES",
    }
    for pattern, word in patterns.items():
        text = re.sub(pattern, word, text)
    return text


def public_roles() -> list[str]:
    """Roles whose name can be looked up and is listed; errors are roles of their own."""
    found = [role for role, name in PUBLIC.items() if name in weight_sync.__all__ and hasattr(weight_sync, name)]
    named = [role for role, kind in ERRORS.items() if getattr(weight_sync, kind.__name__, None) is kind]
    unknown = set(weight_sync.__all__) - {*PUBLIC.values(), *(kind.__name__ for kind in ERRORS.values())}
    return [*found, *named, *(f"unknown: {name}" for name in sorted(unknown))]


def fields_of(what: str) -> dict[str, Any]:
    """Name -> default, or "needed"."""
    kind: Any = {"options": SyncOptions, "report": SyncReport, "times of a replica": ReplicaTimes}[what]
    return {
        field.name: "needed" if field.default is msgspec.NODEFAULT else field.default
        for field in msgspec.structs.fields(kind)
    }


def error_bases() -> dict[str, list[str]]:
    """Golden name -> what it also is."""
    return {
        name: [other for other, base in ERRORS.items() if other != name and issubclass(kind, base)]
        for name, kind in ERRORS.items()
    }


# Plans


class EngineTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"


class Copied(NamedTuple):
    """A box of a checkpoint tensor into a strided view of an engine's, in elements."""

    source: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    to: str
    offset: int
    stride: tuple[int, ...]


class Moves(NamedTuple):
    came_from: list[dict[str, np.ndarray]]
    """Of each worker: engine tensor -> for each of its bytes, which byte of which checkpoint tensor it becomes; -1 for
    none."""
    came_by: list[dict[str, np.ndarray]]
    """... and by which rank."""
    packed: list[int]
    """Bytes of each rank."""
    dtypes: dict[str, str]
    """Of checkpoint tensors as they are sent."""


def moves(saved: Sequence[Saved], held: Sequence[Held], engines: Sequence[Any]) -> Moves:
    """Records the engines' loaders, plans, and carries the plan out on numbers that say where they are from."""
    params = _params(saved)
    layouts = [_recorded(engine, params, worker) for worker, engine in enumerate(engines)]
    plan = build_plan(epoch=1, params=params, shards=_shards(params, held), workers=layouts)
    check_plan(plan)
    dtypes = {meta.name: meta.dtype for meta in plan.params}
    rows = {(h.rank, h.name): (h.start, h.stop) for h in held}
    full, offset = {}, 0
    for meta in plan.params:
        width = DTYPE_BYTES[meta.dtype]
        size = int(np.prod(meta.shape, dtype=np.int64)) * width
        full[meta.name] = np.arange(offset, offset + size).reshape(*(meta.shape or (1,)), width)
        offset += size
    arenas = {pack.rank: np.full(pack.arena_bytes, -2) for pack in plan.pack}
    for pack in plan.pack:
        for item in pack.items:
            first, stop = rows[pack.rank, item.param]
            shard = full[item.param][first:stop]
            box = shard[tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))]
            arenas[pack.rank][item.arena_off : item.arena_off + item.nbytes] = box.ravel()
    came_from = [_bytes_of(layout) for layout in layouts]
    came_by = [_bytes_of(layout) for layout in layouts]
    for pull in plan.pull:
        for run in pull.runs:
            to = slice(run.dst_off, run.dst_off + run.nbytes)
            read = arenas[run.src_rank][run.src_off : run.src_off + run.nbytes]
            assert read.min() >= 0, "padding is read"
            came_from[pull.worker][run.dst_param][to] = read
            came_by[pull.worker][run.dst_param][to] = run.src_rank
    packed = [sum(item.nbytes for item in pack.items) for pack in plan.pack]
    return Moves(came_from, came_by, packed, dtypes)


def refused_plan(
    saved: Sequence[Saved], held: Sequence[Held], workers: Sequence[tuple[Sequence[EngineTensor], Sequence[Copied]]]
) -> list[str]:
    """Why these cannot become a plan."""
    layouts = [
        WorkerLayout(
            worker=number,
            params=tuple(EngineParam(**tensor._asdict()) for tensor in tensors),
            copies=tuple(
                RecordedCopy(
                    src_param=c.source, src_start=c.start, src_size=c.size, dst_param=c.to, dst_offset=c.offset,
                    dst_stride=c.stride,
                )
                for c in copies
            ),
        )
        for number, (tensors, copies) in enumerate(workers)
    ]  # fmt: skip
    params = _params(saved)
    return _error_of(lambda: build_plan(epoch=1, params=params, shards=_shards(params, held), workers=layouts))


def refused_loader(saved: Sequence[Saved], engine: torch.nn.Module) -> list[str]:
    """Why a loader cannot be recorded."""
    return _error_of(lambda: record(engine, _params(saved), worker=0))


def adapter_slot(layers: Mapping[str, LoraLinear]) -> torch.nn.Module:
    """The adapter of these layers, as a model that can be recorded."""
    return AdapterSlot(layers, PACKED, targets=("q_proj", "v_proj", "o_proj"))


def derived_engines(tp: int) -> tuple[list[Saved], list[Any]]:
    """A checkpoint, and engines that keep something else of it than they load."""
    saved = [Saved(meta.name, meta.shape, meta.dtype) for meta in checkpoint_params()]
    return saved, [DerivedEngine(place, tp) for place in range(tp)]


def _params(saved: Sequence[Saved]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta(**entry._asdict()) for entry in saved)


def _shards(params: Sequence[ParamMeta], held: Sequence[Held]) -> list[RankShards]:
    shapes = {meta.name: meta.shape for meta in params}
    boxes: dict[int, list[ShardBox]] = {h.rank: [] for h in held}
    for h in held:
        if h.stop > h.start:
            shape = shapes.get(h.name, ())
            start, size = (h.start, *(0 for _ in shape[1:])), (h.stop - h.start, *shape[1:])
            boxes[h.rank].append(ShardBox(h.name, start, size) if shape else ShardBox(h.name, (), ()))
    return [RankShards.of(rank, params, own) for rank, own in boxes.items()]


def _recorded(engine: Any, params: Sequence[ParamMeta], worker: int) -> WorkerLayout:
    reloader = ToyReloader(engine) if isinstance(engine, DerivedEngine) else None
    return record(engine, params, worker=worker, reloader=reloader).layout


def _bytes_of(layout: WorkerLayout) -> dict[str, np.ndarray]:
    return {p.name: np.full(int(np.prod(p.shape, dtype=np.int64)) * DTYPE_BYTES[p.dtype], -1) for p in layout.params}


def _error_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what a user sees
        return told(error)
    return ["nothing", ""]


# What learners hold


def described(model: str, meshes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What every rank of such meshes says that it holds of a model. In another process: ranks are played in turn."""
    context = forks(*RANKS)
    ours, theirs = context.Pipe()
    process = context.Process(target=_describe, args=(theirs, model, dict(meshes)))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join(30)
    return found


def _describe(answer: Connection, name: str, meshes: Mapping[str, tuple[int, ...]]) -> None:
    answer.send({label: _described(name, mesh) for label, mesh in meshes.items()})


def _described(name: str, mesh: tuple[int, ...]) -> dict[str, str]:
    """Tensor -> dtype, shape, and the rows of each rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: dict[str, str] = {}
    world = int(np.prod(mesh or (2,)))
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        metas, shards, tensors = local_shards(_learner_model(name, mesh, rank), rollout_dtype="bfloat16")
        dist.destroy_process_group()
        params = {meta.name: meta for meta in metas}
        assert rank == 0 or list(params) == list(found), "ranks disagree"
        for meta in metas:
            found.setdefault(meta.name, f"{meta.dtype} {list(meta.shape)}:")
        for shard in shards:
            start, rows = (shard.start[0], shard.size[0]) if shard.size else (0, 1)
            assert (
                tuple(tensors[shard.param].shape)
                == shard.size
                == (params[shard.param].shape and (rows, *params[shard.param].shape[1:]))
            ), shard
            found[shard.param] += f" {start}-{start + rows} of {rank};"
    return found


def _learner_model(name: str, mesh: tuple[int, ...], rank: int) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

    tiny: dict[str, Any] = {
        "hidden_size": 24, "intermediate_size": 14, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 11,
    }  # fmt: skip
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    config = {
        "dense": lambda: Qwen2Config(**tiny),
        "tied": lambda: Qwen2Config(**tiny, tie_word_embeddings=True),
        "experts": lambda: Qwen3MoeConfig(**tiny, **experts, mlp_only_layers=[1]),
        "shared expert": lambda: Qwen2MoeConfig(**tiny, **experts, shared_expert_intermediate_size=4),
    }[name]()
    model: Any = AutoModelForCausalLM.from_config(config)
    if mesh:
        # DTensor caches meshes by value, and with them the rank they belong to.
        names = tuple(f"{name.partition(' ')[0]}{'x'.join(map(str, mesh))}_{rank}_{dim}" for dim in range(len(mesh)))
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        for layer in model.model.layers:
            fully_shard(layer, mesh=devices)
        fully_shard(model, mesh=devices)
    return model


# Slots of a learner


class Slots:
    """The slots of one rank. A version is held by one party at most; holding it again gives it more time."""

    def __init__(self, num_slots: int) -> None:
        self._table = SlotTable(num_slots, clock=lambda: self.now)
        self._packing: int | None = None
        self._held: dict[int, Any] = {}
        self.now = 0.0

    def pack(self, version: int) -> str:
        """Begin; "waits" if no slot can be taken."""
        try:
            self._packing = self._table.try_begin(version)
        except ValueError as error:
            return " ".join(told(error))
        return "waits" if self._packing is None else "packs"

    def packed(self, *, is_good: bool) -> str:
        """The pack has ended."""
        assert self._packing is not None
        index, self._packing = self._packing, None
        if is_good:
            self._table.seal(index)
        else:
            self._table.abort(index, "the pack failed")
        return "sealed" if is_good else "free"

    def hold(self, version: int, ttl_s: float) -> str:
        try:
            pinned = self._table.pin(version, ttl_s)
        except errors.VersionUnavailable as error:
            return told(error)[0]
        if not pinned.done():
            self._table.unpin(version)
            return "not packed yet"
        self._held[version] = pinned.result()
        return "held"

    def let_go(self, version: int) -> str:
        """Whether what was read is whole."""
        if version not in self._held:
            return "was not held"
        pinned = self._held.pop(version)
        self._table.unpin(version)
        is_intact = self._table.holding(pinned.slot, pinned.generation) is not None
        return "intact" if is_intact else "overwritten"

    def states(self) -> list[str]:
        """Of each slot, in no order."""
        self._table.slot_of(0)  # time has passed
        words = {"pinned": "held"}
        states = ((slot.state.value, slot.version) for slot in self._table.slots)
        return sorted(
            words.get(state, state) + ("" if version is None or state == "packing" else f" {version}")
            for state, version in states
        )


# Membership


class _Engine:
    """A replica with one worker. `faults` are taken one after the other, each by the phase that it names."""

    def __init__(self, name: str, learner: _Learner) -> None:
        self.name = name
        self.learner = learner
        self.faults: list[tuple[str, str]] = []
        self.is_paused = False
        self.is_dead = False
        self.version: int | None = None

    def fault(self, phase: str) -> str:
        found = next((fault for fault in self.faults if fault[0] == phase), None)
        if found is None:
            return ""
        self.faults.remove(found)
        self.is_dead = self.is_dead or found[1] == "dies"
        return found[1]

    async def call(self, method: str, *_: object, timeout_s: float) -> list[Any]:
        if self.is_dead:
            raise ConnectionError(f"{self.name} is gone")
        return []

    async def commit(self, version: int, method: str, *_: object, timeout_s: float) -> CommitResult:
        how = self.fault("commit")
        if self.is_dead:
            raise ConnectionError(f"{self.name} is gone")
        self.is_paused = True
        await asyncio.sleep(timeout_s if how == "hangs" else 1.0)
        if how == "hangs":
            raise TimeoutError(f"{self.name} did not answer commit within {timeout_s:.1f} s")
        self.is_paused = how == "dirty"
        if how:
            reply = Reply(ok=False, error="PullTimeout", message="the version did not arrive", dirty=how == "dirty")
            return CommitResult(results=[encode(reply)], pause_s=1.0)
        self.version = version
        numbers = dict.fromkeys(("attest_s", "commit_s"), 0.1)
        counts = dict.fromkeys(("nbytes", "num_runs"), 1) | dict.fromkeys(("num_retries", "num_stalls"), 0)
        report = PullReport(
            worker=0, version=version, pull_s=2.0, pull_by_source={0: 2.0}, counters={}, **numbers, **counts
        )
        return CommitResult(results=[encode(Reply(ok=True, value=encode(report)))], pause_s=1.0, drain_s=0.5)


class _Learner:
    """Keeps the last two versions, and what is pinned."""

    rank = 0

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.pinned = set[int]()

    async def publish(self, version: int) -> list[bytes]:
        await asyncio.sleep(1.0)
        self.versions = [*(v for v in self.versions[-1:] if v != version), version]
        return [encode(PackReport(rank=0, version=version, slot=0, nbytes=1, wait_s=0.0, pack_s=1.0, counters={}))]

    async def call(self, method: str, *_: object, timeout_s: float) -> Any:
        return None


class _Lines:
    """To the engines' workers. A pull takes two seconds, a slow one eight."""

    def __init__(self, engines: Mapping[str, _Engine]) -> None:
        self._engines = engines

    def dial(self, peer: str, address: object) -> str:
        return peer

    def hang_up(self, line: str) -> None: ...

    async def ask_patiently(self, line: str, request: object, kind: type, *, deadline_s: float) -> object:
        engine = self._engines[line.partition("/")[0]]
        how = ""
        if isinstance(request, PrefetchRequest):
            how = engine.fault("pull")
        if engine.is_dead:
            await asyncio.sleep(deadline_s)
            raise TimeoutError(f"{engine.name} is gone")
        assert isinstance(request, PrefetchRequest)
        await asyncio.sleep(8.0 if how == "is slow" else 2.0)
        if how == "fails":
            raise errors.DigestMismatch(f"version {request.version} did not arrive whole")
        return Ok()


class _Opener:
    """Everybody agrees at once, but for a newcomer with the fault ("open", "refused")."""

    epoch = 1

    def __init__(self, learner: _Learner) -> None:
        self._learner = learner

    async def open(self, _members: Sequence[Any], _give_up: float) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(root="simulated"))

    async def check_layout(self, _agreement: Any, member: Any, _give_up: float) -> None:
        if member.handle.fault("open"):
            raise errors.PlanMismatch(f"replica {member.name} splits the model differently from the others")

    async def connect(self, _agreement: Any, connecting: Sequence[Any], _give_up: float) -> None:
        for member in connecting:
            worker: Any = SimpleNamespace(worker=0, commit="staged", address=None)
            lines: Any = _Lines({member.name: member.handle})
            member.connect((worker,), lines)

    async def link(self, *_: Any) -> None: ...

    async def unlink(self, *_: Any) -> None: ...

    async def release(self, *_: Any) -> None: ...

    async def on_learners(self, _agreement: Any, request: Any, _kind: type, *, deadline_s: float) -> dict[int, Any]:
        learner, version = self._learner, request.version
        if isinstance(request, Unpin):
            learner.pinned.discard(version)
            return {0: Ok()}
        held = sorted({*learner.versions, *learner.pinned})
        if version not in held:
            raise errors.VersionUnavailable(f"version {version} is not held here, held: {held}")
        learner.pinned.add(version)
        return {0: Pinned(slot=0, generation=version, seal_s=0.1)}

    async def close(self, _agreement: Any, members: Sequence[Any], _timeout_s: float) -> None:
        for member in members:
            member.disconnect()

    async def on_publishers(self, method: str, version: int = 0, *_: object, timeout_s: float) -> list[bytes]:
        assert method == "ws_publish"
        return await self._learner.publish(version)


def membership(script: Sequence[str], folder: Path) -> dict[str, Any]:
    """Plays operations on a coordinator with replicas r0 and r1 in virtual time. Of each: what came of it, the seconds
    it took, and every replica's state afterwards; and what was logged."""
    with logged(folder) as lines:
        trace = run_virtual(_Membership().play(script))
    return {"trace": trace, "log": [plain_text(line) for line in lines]}


class _Membership:
    def __init__(self) -> None:
        self._learner = _Learner()
        self._engines = {name: _Engine(name, self._learner) for name in ("r0", "r1")}
        self._blocks: dict[str, tuple[asyncio.Task[Any], asyncio.Event]] = {}
        self._begun: dict[str, asyncio.Task[Any]] = {}

    async def play(self, script: Sequence[str]) -> list[Any]:
        now = asyncio.get_running_loop().time
        learner: Any = self._learner
        self._coordinator = SyncCoordinator(
            [learner], list(self._engines.values()), options=SyncOptions(timeout_s=20.0), clock=now
        )
        anything: Any = self._coordinator
        anything._opener = _Opener(self._learner)
        await self._coordinator.open()
        trace = []
        for line in script:
            started = now()
            try:
                outcome = await self._operate(line.split())
            except Exception as error:  # noqa: BLE001 - what came of it
                outcome = told(error)
            trace.append([line, outcome, round(now() - started, 3), self._states()])
        for task, end in self._blocks.values():
            end.set()
            await asyncio.wait([task])
        for task in self._begun.values():
            task.cancel()
        return trace

    async def _operate(self, words: list[str]) -> Any:
        match words:
            case ["begin", *rest]:
                self._begun[rest[0]] = asyncio.create_task(self._operate(rest))
                await asyncio.sleep(0)
                return "begun"
            case ["end", name]:
                return await self._begun.pop(name)
            case ["step", number]:
                await self._coordinator.publish(int(number))
                return await self._sync(int(number))
            case ["publish", number]:
                return await self._coordinator.publish(int(number))
            case ["sync", number]:
                return await self._sync(int(number))
            case ["wait", seconds]:
                return await asyncio.sleep(float(seconds))
            case ["fault", name, phase, *how]:
                return self._engines[name].faults.append((phase, " ".join(how)))
            case ["hold" | "freeze" as kind, name]:
                held, end = asyncio.Event(), asyncio.Event()
                task = asyncio.create_task(self._block(kind, name, held, end))
                self._blocks[name] = task, end
                waiting = asyncio.create_task(held.wait())
                await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                return await task if task.done() else "in it"
            case ["let", "go", name]:
                task, end = self._blocks.pop(name)
                end.set()
                return await task
            case ["join", name, *how]:
                engine = self._engines[name] = _Engine(name, self._learner)
                engine.faults += [("open", "refused")] if how else []
                return await self._coordinator.join(engine)
            case ["leave", name]:
                return await self._coordinator.leave(name)
            case _:
                raise AssertionError(words)

    async def _sync(self, version: int) -> dict[str, Any]:
        report = await self._coordinator.sync(version)
        counts = ("version", "version_lag", "replicas_live", "replicas_skipped", "num_retries")
        return {name: getattr(report, name) for name in counts} | {"took": sorted(report.replicas)}

    async def _block(self, kind: str, name: str, held: asyncio.Event, end: asyncio.Event) -> int | None:
        enter = self._coordinator.lease if kind == "hold" else self._coordinator.freeze
        async with enter(name) as version:
            held.set()
            await end.wait()
        return version

    def _states(self) -> dict[str, str]:
        leased = {name for name, member in self._coordinator._members.items() if member.num_leases}
        versions, found = self._coordinator.live_versions, {}
        for name, state in self._coordinator.members.items():
            word = "held" if name in leased and state == "live" else {"live": "live"}.get(state, f"lost, {state}")
            paused = ", paused" if self._engines[name].is_paused else ""
            found[name] = f"{word}, version {versions[name]}{paused}"
        return found


# Calls that are refused


def refused_calls() -> dict[str, list[str]]:
    """Calls out of order or with nonsense, and what a user reads."""
    now = 0.0
    table = SlotTable(1, clock=lambda: now)
    table.seal(table.begin(1, deadline_s=0.0))
    table.pin(1, 10.0)
    publisher, replica = LocalPublisher(0, 1, full_weights(0)), LocalReplica("r0")
    receiver: Any = replica.receivers[0]
    handles: Any = [publisher], [replica]
    coordinator = SyncCoordinator(*handles, options=SyncOptions())
    calls: dict[str, Callable[[], Any]] = {
        "publish, every slot is read": lambda: table.begin(2, deadline_s=0.0),
        "read a version that is gone": lambda: table.pin(3, 1.0),
        "publish, not opened": lambda: publisher.ws_publish(1, 1.0),
        "open a publisher with nonsense": lambda: publisher.ws_open(b"nonsense"),
        "prefetch, not opened": lambda: receiver.prefetch(1, (), deadline_s=1.0),
        "commit, not opened": lambda: receiver.commit(1, deadline_s=1.0),
        "no replica": lambda: SyncCoordinator(handles[0], [], options=SyncOptions()),
        "one name twice": lambda: SyncCoordinator(handles[0], [*handles[1]] * 2, options=SyncOptions()),
        "sync, nothing published": lambda: asyncio.run(coordinator.sync(1)),
        "join, not opened": lambda: asyncio.run(coordinator.join(handles[1][0])),
        "leave, the last one": lambda: asyncio.run(coordinator.leave("r0")),
        "leave, unknown": lambda: asyncio.run(coordinator.leave("r7")),
        "no such backend": lambda: get_backend("abacus"),
        "no such public name": lambda: weight_sync.Nothing,
        "no such dtype": lambda: local_shards(torch.nn.Linear(2, 2), rollout_dtype="bf16"),
    }
    return {name: _error_of(call) for name, call in calls.items()}


# The benchmark


def benched(argv: Sequence[str], folder: Path) -> dict[str, Any]:
    """Of a run of the benchmark: exit code, output (or errors) without numbers, and the fields of its JSON."""
    out, suite = folder / "out.json", folder / "suite.json"
    if "--suite" in argv:
        suite.write_text(argv[-1], encoding="utf-8")
        argv = [*argv[:-1], str(suite)]
    ended = subprocess.run(
        [sys.executable, "-m", "weight_sync.bench", *argv, "--json", str(out)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    lines = (ended.stdout or ended.stderr).splitlines()
    written = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {
        "exit": ended.returncode,
        "printed": [re.sub(r" +", " ", re.sub(r"-?\d+(\.\d+)?", "#", line)) for line in lines],
        "json": [_types(json.loads(line)) for line in written],
    }


def bench_options() -> list[str]:
    """Of its command line, with what they take."""
    actions = bench_parser()._actions
    return [f"{' '.join(a.option_strings)}: {' '.join(a.choices) if a.choices else a.metavar}" for a in actions]


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _types(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [*dict.fromkeys(json.dumps(_types(entry)) for entry in value)]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
