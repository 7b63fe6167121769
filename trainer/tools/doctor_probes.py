"""The probes of the doctor. `python -m trainer.tools.doctor_probes PROBE DEVICE [TRANSPORT]` runs one.

Each returns an `Outcome`, or raises: what a device claims to support and does not do is a failure.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import multiprocessing
import os
import platform
import re
import resource
import socket
import sys
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.tools.doctor import Outcome
from weight_sync.device.fused import BatchCopy, BatchDigest
from weight_sync.device.select import build, get_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    import torch

    from weight_sync.device.base import Backend

NBYTES = 256 << 20
ANSWER_S = 120.0
"""For the second process of a probe; also the timeout of its collectives."""
CONNECT_S = 5.0
PACKAGES = re.compile(r"(py)?torch|vllm|triton|ray$|transformers|numpy$|pyzmq|msgspec|tandem", re.IGNORECASE)
MODULES = ("torch", "transformers", "ray", "vllm")
LEAST_FILES, LEAST_SHM_BYTES, LEAST_PORTS = 4096, 1 << 30, 4096


class Wrong(Exception):
    """A device, a driver or a library does not do what it claims."""


def machine(_device: str) -> Outcome:
    """System, memory, limits."""
    from weight_sync.device.cpu import host_memory

    free, total = host_memory()
    shm = os.statvfs("/dev/shm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_container = any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
    shm_bytes = shm.f_bavail * shm.f_frsize
    warnings = []
    if shm_bytes < LEAST_SHM_BYTES:
        warnings.append("/dev/shm is small; collective libraries and Ray want 1 GiB or more: docker run --shm-size=16g")
    if hard < LEAST_FILES:
        warnings.append(f"a process may open {hard} files; raise the hard limit to {LEAST_FILES} or more: ulimit -Hn")
    lines = [
        f"{platform.platform()}, Python {platform.python_version()}{', in a container' if is_container else ''}",
        f"{len(os.sched_getaffinity(0))} cores, {free / 2**30:.1f} of {total / 2**30:.1f} GiB of memory free",
        f"/dev/shm has {shm_bytes / 2**30:.1f} GiB free; open files: {soft}, at most {hard}",
    ]
    return Outcome("warning" if warnings else "ok", [*lines, *warnings])


def network(_device: str) -> Outcome:
    """Listens on loopback and on the address that other nodes use, and connects there."""
    import zmq

    from weight_sync.node import reachable_host

    if not zmq.has("curve"):
        raise Wrong("libzmq was built without CURVE, which the control channel needs; install pyzmq from PyPI")
    reachable = reachable_host()
    for host in dict.fromkeys(("127.0.0.1", reachable)):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with (
            socket.create_server((host, 0), family=family) as server,
            socket.create_connection((host, server.getsockname()[1]), timeout=CONNECT_S),
        ):
            server.settimeout(CONNECT_S)
            server.accept()[0].close()
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    lines = [f"loopback {'' if reachable == '127.0.0.1' else 'and the default route '}work; ports {first}-{last}"]
    if last - first < LEAST_PORTS:
        return Outcome("warning", [*lines, f"few ports; widen net.ipv4.ip_local_port_range to {LEAST_PORTS} or more"])
    return Outcome("ok", lines)


def packages(_device: str) -> Outcome:
    """Versions, from metadata, and whether they go together."""
    from trainer.driver.preflight import engine_package_problems, torchvision_problems

    found = {d.name: d.version for d in importlib.metadata.distributions() if PACKAGES.match(d.name)}
    problems = [f"{p.message} ({p.value}); {p.hint}" for p in (*engine_package_problems(), *torchvision_problems())]
    lines = [", ".join(f"{name} {version}" for name, version in sorted(found.items()))]
    return Outcome("FAILED" if problems else "ok", [*problems, *lines])


def imports(_device: str) -> Outcome:
    """The libraries that can fail when they are imported. Also how torch was built."""
    lines = []
    for name in MODULES:
        started = time.monotonic()
        importlib.import_module(name)
        lines.append(f"{name} in {time.monotonic() - started:.1f} s")
    version: Any = importlib.import_module("torch.version")
    built = {k: v for k, v in vars(version).items() if k[0] != "_" and isinstance(v, str)}
    return Outcome("ok", [", ".join(lines), f"torch was built for {built}"])


def device(name: str) -> Outcome:
    """Which device there is, and what it claims."""
    from weight_sync.transports.exporter import offered

    if name != "auto":
        _set_environment(build(name))
    backend = get_backend(name)
    environment = _set_environment(backend)
    num_devices = backend.num_devices()
    if num_devices < 1:
        raise Wrong(f"no {backend.name} device is visible; check {backend.visible_devices_var}")
    backend.set_device(0)
    can = backend.capabilities()
    claims = [claim for claim in type(can).__dataclass_fields__ if getattr(can, claim)]
    free, total = backend.memory_info()
    there = "host memory" if backend.ray_resource is None else f"{num_devices} x {backend.device_name()}"
    lines = [
        f"{backend.name}: {there}",
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free; claims {', '.join(claims)}; {backend.collective}",
        *backend.versions(),
    ]
    problems = backend.check_env("driver", dict(os.environ))
    # A device's own library does not connect two processes on one device.
    ways = [*dict.fromkeys((*offered("auto", backend), "shm", "gloo"))]
    if backend.ray_resource is not None and num_devices == 1:
        libraries = [way for way in ways if way != "gloo" and way in backend.collective]
        ways = [way for way in ways if way not in libraries]
        lines.append(f"one device only: {', '.join(libraries)} is not tried")
    facts = {"device": backend.name, "transports": ways, "environment": environment}
    return Outcome("FAILED" if problems else "ok", [*problems, *lines], facts)


def memory(name: str) -> Outcome:
    """On every device: a block of the driver's memory, copies both ways, digests, casts."""
    import torch

    from weight_sync.device.digest import digest_bytes

    backend, lines = get_backend(name), []
    pattern = _pattern()
    expected = digest_bytes(pattern)
    values = torch.linspace(-3.0, 3.0, 1 << 20)
    for index in _devices(backend):
        target = backend.set_device(index)
        first, second = (backend.alloc_persistent(NBYTES) for _ in range(2))
        try:
            first.tensor.copy_(pattern)
            stream = backend.new_stream()
            backend.synchronize()
            started = time.monotonic()
            backend.copy_async(second.tensor, first.tensor, stream)
            backend.synchronize(stream)
            seconds = time.monotonic() - started
            # Views of a block must be gone before it is closed.
            digests = {backend.digest(second.tensor), *BatchDigest(backend, [second.tensor])()}
            if digests != {expected} or not torch.equal(second.tensor.cpu(), pattern):
                raise Wrong(f"device {index}: bytes that were copied differ, or digests do")
            cast = torch.empty(values.shape, dtype=torch.bfloat16, device=target)
            BatchCopy(backend, [(cast, values.to(target))])()
            backend.synchronize()
            if not torch.equal(cast.cpu(), values.to(torch.bfloat16)):
                raise Wrong(f"device {index}: float32 is rounded to other bfloat16 values than on the host")
            lines.append(f"device {index}: copies {NBYTES / seconds / 1e9:.1f} GB/s")
        finally:
            second.close()
            first.close()
    return Outcome("ok", lines)


PIN_S = 20.0


def pinned(name: str) -> Outcome:
    """Shared host memory that the driver registers, copied to and from the device."""
    from weight_sync.device.cpu import CpuBackend
    from weight_sync.device.digest import digest_bytes

    backend = get_backend(name)
    if backend.ray_resource is None:
        return Outcome("skipped", ["host memory is the device"])
    backend.set_device(0)
    pattern = _pattern()
    with ExitStack() as stack:
        host, on_device = CpuBackend().alloc_persistent(NBYTES), backend.alloc_persistent(NBYTES)
        stack.callback(on_device.close)
        stack.callback(host.close)
        host.tensor.copy_(pattern)
        rates = []
        for is_pinned in (False, True):
            pinning = backend.pin(host, [(0, NBYTES)]) if is_pinned else None
            if pinning is not None and not pinning.wait(PIN_S):
                raise Wrong(f"the driver did not register {NBYTES} bytes of host memory; the log says why")
            started = time.monotonic()
            backend.copy_async(on_device.tensor, host.tensor)
            backend.synchronize()
            rates.append(NBYTES / (time.monotonic() - started) / 1e9)
        host.tensor.zero_()
        backend.copy_async(host.tensor, on_device.tensor)
        backend.synchronize()
        if digest_bytes(host.tensor) != digest_bytes(pattern):
            raise Wrong("bytes that went from pinned host memory to the device and back differ")
    return Outcome("ok", [f"host -> device 0: {rates[0]:.1f} GB/s before it is registered, {rates[1]:.1f} GB/s after"])


def ipc(name: str) -> Outcome:
    """A block of this process, read by a second one, on the same device and on the last one."""
    from weight_sync.device.digest import digest_bytes

    backend = get_backend(name)
    if not backend.capabilities().ipc:
        return Outcome("skipped", [f"{backend.name} does not claim it here"])
    pattern, indices = _pattern(), _devices(backend)
    expected, lines = digest_bytes(pattern), []
    backend.set_device(0)
    block = backend.alloc_persistent(NBYTES)
    try:
        block.tensor.copy_(pattern)
        backend.synchronize()
        for index in dict.fromkeys((indices[0], indices[-1])):
            with _second_process(_read_block, name, index, backend.ipc_export(block)) as answer:
                digest, seconds = answer()
            if digest != expected:
                raise Wrong(f"device {index} of a second process reads other bytes than device 0 of this one wrote")
            lines.append(f"device 0 -> {index} of a second process: {NBYTES / seconds / 1e9:.1f} GB/s")
    finally:
        block.close()
    return Outcome("ok", lines)


def _read_block(name: str, index: int, handle: Any) -> tuple[int, float]:
    import torch

    backend = get_backend(name)
    target = torch.empty(NBYTES, dtype=torch.uint8, device=backend.set_device(index))
    block = backend.ipc_open(handle)
    try:
        for _ in range(2):  # the first maps pages
            started = time.monotonic()
            backend.copy_async(target, block.tensor)
            backend.synchronize()
        return backend.digest(target), time.monotonic() - started
    finally:
        block.close()


def collectives(name: str) -> Outcome:
    """What a learner of two ranks needs: sums, gathers and scattered sums."""
    import torch.distributed as dist

    backend = get_backend(name)
    if len(_devices(backend)) < 2 and backend.ray_resource is not None:
        return Outcome("skipped", ["one device only, and two ranks need two"])
    make: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, but torch does not list it
    store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=ANSWER_S))
    with _second_process(_rank, name, 1, store.port) as answer:
        seconds = _rank(name, 0, store.port)
        answer()
    return Outcome("ok", [f"{backend.collective}, 2 ranks: a sum of {NBYTES >> 20} MiB takes {1000 * seconds:.0f} ms"])


def _rank(name: str, rank: int, port: int) -> float:
    """Raises Wrong if a collective gives other numbers than arithmetic."""
    import torch
    import torch.distributed as dist

    backend = get_backend(name)
    target = backend.set_device(0 if backend.ray_resource is None else rank)
    make: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    store = make("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=ANSWER_S))
    dist.init_process_group(
        backend.collective, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=ANSWER_S)
    )
    try:
        many = torch.full((NBYTES // 4,), rank + 1.0, device=target)
        dist.all_reduce(many)
        gathered, scattered = torch.zeros(8, device=target), torch.zeros(4, device=target)
        dist.all_gather_into_tensor(gathered, torch.full((4,), rank + 1.0, device=target))
        dist.reduce_scatter_tensor(scattered, torch.arange(8.0, device=target))
        on_host = torch.full((4,), rank + 1.0)
        dist.all_reduce(on_host)
        expected = {
            "the sum": (many[::4096].cpu(), 3.0),
            "the sum on the host": (on_host, 3.0),
            "the gather": (gathered.cpu(), torch.tensor([1.0, 2.0]).repeat_interleave(4)),
            "the scattered sum": (scattered.cpu(), 2 * (torch.arange(4.0) + 4 * rank)),
        }
        for what, (found, wanted) in expected.items():
            if not bool((found == wanted).all()):
                raise Wrong(f"{what} of rank {rank} is wrong")
        backend.synchronize()
        started = time.monotonic()
        dist.all_reduce(many)
        backend.synchronize()
        return time.monotonic() - started
    finally:
        dist.destroy_process_group()


def sync(name: str, transport: str) -> Outcome:
    """Weight syncs of a tiny model from a learner to an engine worker, compared bit for bit."""
    from weight_sync.bench.case import Case
    from weight_sync.bench.run import measure

    backend = get_backend(name)
    shares = backend.ray_resource is not None and backend.num_devices() == 1
    found = measure(
        Case(model="tiny", device=name, transport=transport, colocate=shares, syncs=3, timeout=60.0, baselines=False)
    )
    if problems := found.problems():
        return Outcome("FAILED", problems)
    return Outcome(
        "ok", [f"{found.transport}, {found.commit}: {found.as_json()['figures']['total_s']['p50'] * 1000:.1f} ms"]
    )


PROBES: dict[str, Callable[..., Outcome]] = {
    probe.__name__: probe
    for probe in (machine, network, packages, imports, device, memory, pinned, ipc, collectives, sync)
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Write the outcome as JSON; what libraries print goes to standard error. A warning in the log makes it one."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    probe, *arguments = argv
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("weight_sync").addHandler(handler)
    try:
        outcome = PROBES[probe](*arguments)
    except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises belongs into the report
        text = " ".join(str(error).split())[:2000]
        outcome = Outcome("FAILED", [text if isinstance(error, Wrong) else f"{type(error).__name__}: {text}"])
    if warnings:
        state = "warning" if outcome.state == "ok" else outcome.state
        outcome = outcome._replace(state=state, lines=[*outcome.lines, *warnings[:10]])
    with answer:
        answer.write(json.dumps(outcome._asdict()))


def _set_environment(backend: Backend) -> dict[str, str]:
    """Variables of a learner that are not set: a driver reads them once, when it is first called."""
    from weight_sync.device.environment import merge_env

    found = merge_env(backend.process_env("learner"), {}, os.environ)
    os.environ.update(found)
    return found


def _devices(backend: Backend) -> range:
    return range(1 if backend.ray_resource is None else backend.num_devices())


def _pattern() -> torch.Tensor:
    import torch

    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


@contextmanager
def _second_process(function: Callable[..., Any], *args: Any) -> Iterator[Callable[[], Any]]:
    """Call `function` in another process. The way to its result raises what it raised, and notices if it crashes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()

    def answer() -> Any:
        if not ours.poll(ANSWER_S):
            raise Wrong(f"the second process did not answer within {ANSWER_S:.0f} s")
        try:
            value, problem = ours.recv()
        except EOFError:
            process.join(5.0)
            raise Wrong(f"the second process crashed (exit code {process.exitcode})") from None
        if problem:
            raise Wrong(f"the second process: {problem}")
        return value

    try:
        yield answer
    finally:
        process.join(5.0)
        process.kill()
        process.join(5.0)


def _answer(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        connection.send((function(*args), ""))
    except Exception as error:  # noqa: BLE001 - raised again by the process that asked
        connection.send((None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(sys.argv[1:])
