"""Reward functions that do what the response says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

_num_running = 0


def reward(*, prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> object:
    print("user code may print")
    match response.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
            return os.getpid()
        case ["spin"]:
            while True:
                pass
        case ["allocate", num_mib]:
            return len(bytearray(int(num_mib) << 20)) >> 20
        case ["arguments"]:
            return metadata["level"] + len(prompt) + len(answer)
        case ["modules"]:
            names = {name.partition(".")[0] for name in sys.modules}
            return {"reward": 0, **{name: name in names for name in ("torch", "ray", "pytest")}}
        case ["has_key", name]:
            return name in os.environ
        case ["garbage", *text]:
            return _write_everywhere(" ".join(text).replace("|", "\n").encode())
        case _:
            return _either(response)


async def judge(*, prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> object:
    global _num_running
    _num_running += 1
    try:
        match response.split():
            case ["sleep", seconds]:
                await asyncio.sleep(float(seconds))
                return os.getpid()
            case ["thread", seconds]:
                await asyncio.to_thread(time.sleep, float(seconds))
            case ["count"]:
                await asyncio.sleep(0.05)
                return _num_running
            case ["deaf"]:
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(600)
            case ["note", path]:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    Path(path).touch()
                    raise
            case _:
                return _either(response)
    finally:
        _num_running -= 1
    return 1.0


def _either(response: str) -> object:
    match response.split():
        case ["value", number]:
            return float(number)
        case ["dict"]:
            return {"reward": 0.5, "format": 1, "length": 2.0}
        case ["score_only"]:
            return {"score": 1.0}
        case ["text"]:
            return "1.0"
        case ["none"]:
            return None
        case ["pid"]:
            return os.getpid()
        case ["raise"]:
            raise TimeoutError("of mine")
        case ["surrogate"]:
            raise ValueError("\ud800")
        case ["exit"]:
            sys.exit(3)
        case ["die"]:
            os._exit(7)
        case ["block"]:
            time.sleep(600)
        case ["program", path, leaves]:
            _start_program(path, leaves == "leaves")
            time.sleep(600)
        case ["die_after_program", path, leaves]:
            _start_program(path, leaves == "leaves")
            os.kill(os.getpid(), 11)
        case ["chain", path]:
            while True:
                with Path(path).open("a") as file:
                    file.write(f"{os.getpid()} ")
                if child := os.fork():
                    os.waitpid(child, 0)
                time.sleep(0.003)
        case ["stop_guards", path]:
            guard = psutil.Process().parent()
            outer = guard.parent() if guard is not None else None
            assert guard is not None and outer is not None
            program = _start_program(path, leaves=True)
            Path(path).write_text(f"{guard.pid} {outer.pid} {os.getpid()} {program}")
            outer.suspend()
            guard.suspend()
            time.sleep(600)
        case ["print", text]:
            print(text, flush=True)
        case ["flood", num_mib]:
            subprocess.run([sys.executable, "-c", f"print('x' * ({num_mib} << 20))"], check=True)
        case ["endless"]:
            while True:
                os.write(1, b"x" * 65536)
        case _:
            raise AssertionError(response)
    return 1.0


def _start_program(path: str, leaves: bool) -> int:
    """A program that holds the pipes of the process; `leaves` means its session."""
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(program, start_new_session=leaves, close_fds=False)
    Path(path).write_text(str(child.pid))
    return child.pid


def _write_everywhere(text: bytes) -> float:
    for descriptor in range(3, 40):
        with contextlib.suppress(OSError):
            os.write(descriptor, text)
    return 0.5


def other(**_: object) -> float:
    return -5.0


class Judge:
    async def __call__(self, **_: object) -> float:
        return 2.0


other_judge = Judge()
