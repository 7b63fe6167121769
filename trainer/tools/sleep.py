"""`python -m trainer sleep MODEL`: shows whether an engine that sleeps gives its device memory back.

`mode=colocated` depends on it, and a driver or a build of vLLM may keep the memory without saying so, ROCm before 6.3.4
among them. One engine is started on the first device, put to sleep and woken a few times; what is free on the device is
read from the driver in this process. The engine's weights are drawn at random, so MODEL needs no more than a
`config.json`. Exit code: 0 the memory comes back every time, 1 it does not, 2 the engine cannot sleep here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_engine import VllmEngine
from weight_sync.device import DeviceError, get_backend, merge_env
from weight_sync.device.select import AUTO_ORDER
from weight_sync.messages import answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.engine.interface import Engine
    from weight_sync.device import Backend

EXIT_WELL, EXIT_KEPT, EXIT_UNUSABLE = 0, 1, 2
MIN_GIVEN_BACK = 0.9
"""Of what the engine took. Its context and its graphs stay."""
LEAK_BYTES = 256 << 20
"""More than this between the first and the last sleep is a leak."""
TIMEOUT_S = 300.0
GIB = 1 << 30


class Awake:
    """Mixed into vLLM's worker: a commit that brings nothing wakes the engine."""

    def ws_nothing(self) -> bytes:
        return answer(lambda: b"", is_dirty=lambda: False)


class Round(NamedTuple):
    """Free bytes of the device."""

    awake: int
    asleep: int


def main(
    argv: Sequence[str] | None = None,
    *,
    backend: Backend | None = None,
    build: Callable[[EngineSpec], Engine] = VllmEngine,
) -> int:
    """Returns the exit code. `backend` and `build` are for tests."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer sleep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="directory with a config.json, or a name of the hub")
    add("--device", default="auto", choices=("auto", *AUTO_ORDER), help="default: the first that is there")
    add("--level", type=int, default=2, choices=(1, 2), help="2 drops the weights, 1 keeps them on the host; default 2")
    add("--rounds", type=int, default=3, help="how often it sleeps; default 3")
    add("--gpu-memory-utilization", type=float, default=0.5, help="share of the device that it takes; default 0.5")
    line = parser.parse_args(argv)
    try:
        backend = get_backend(line.device) if backend is None else backend
        if not backend.capabilities().sleep_mode:
            raise DeviceError(f"engines on {backend.name} cannot sleep with what is installed; see docs/backends.md")
        backend.set_device(0)
    except DeviceError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNUSABLE
    spec = EngineSpec(
        model=line.model,
        device=backend.name,
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=line.gpu_memory_utilization,
        sleep_level=line.level,
        in_flight="abort",
        extension=f"{Awake.__module__}.{Awake.__name__}",
        forks=False,
        env=merge_env(backend.process_env("engine"), {}, os.environ),
        engine_args={"load_format": "dummy", **backend.engine_args({})},
    )
    before = backend.memory_info()[0]
    rounds = asyncio.run(_sleep(build(spec), line.rounds, lambda: backend.memory_info()[0]))
    _write(f"device {backend.name} ({backend.device_name()}), sleep level {line.level}, free before: {_gib(before)}")
    for index, found in enumerate(rounds):
        _write(f"round {index + 1}: awake {_gib(found.awake)} free, asleep {_gib(found.asleep)} free")
    problems = kept(before, rounds)
    _write(*problems, "the memory is not given back" if problems else "the memory is given back")
    return EXIT_KEPT if problems else EXIT_WELL


async def _sleep(engine: Engine, num_rounds: int, free: Callable[[], int]) -> list[Round]:
    rounds: list[Round] = []
    async with asyncio.timeout(TIMEOUT_S * (1 + num_rounds)):
        try:
            await engine.start()
            for index in range(num_rounds):
                awake = free()
                await engine.sleep()
                rounds.append(Round(awake, free()))
                await engine.commit(index + 1, "ws_nothing", timeout_s=TIMEOUT_S)
        finally:
            await engine.close()
    return rounds


def kept(before: int, rounds: Sequence[Round]) -> list[str]:
    """What is wrong with these rounds, after `before` bytes were free without the engine."""
    problems: list[str] = []
    for index, found in enumerate(rounds):
        taken, given_back = before - found.awake, found.asleep - found.awake
        if taken <= LEAK_BYTES:
            problems.append(
                f"round {index + 1}: the engine took {_gib(taken)}, too little to tell; raise "
                "--gpu-memory-utilization, or the driver counts the memory of each process by itself"
            )
        elif given_back < MIN_GIVEN_BACK * taken:
            problems.append(f"round {index + 1}: of {_gib(taken)} that the engine took, {_gib(given_back)} came back")
    if lost := max(0, rounds[0].asleep - rounds[-1].asleep - LEAK_BYTES):
        problems.append(f"asleep, {_gib(lost + LEAK_BYTES)} less were free in the last round than in the first: a leak")
    return problems


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _write(*lines: str) -> None:
    sys.stdout.writelines(f"{text}\n" for text in lines)
