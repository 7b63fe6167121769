"""A second process that allocates, exports, opens, reads and writes blocks on request: `Peer` talks to it.

Run as `python -m tests.fakes.drivers.peer`; one JSON request per line on stdin, one JSON answer per line on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from weight_sync.device.base import Backend, IpcHandle, PersistentBlock
from weight_sync.errors import DeviceError

ROOT = Path(__file__).parents[3]


class Peer:
    """The parent's end. Every method is a round trip; an error on the other side is raised here as DeviceError."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        command = [sys.executable, "-m", "tests.fakes.drivers.peer"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, op: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the peer ended with {self._process.wait(10)} during {op}"
        answer = json.loads(line)
        if "error" in answer:
            raise DeviceError(answer["error"])
        return answer["result"]

    def export(self, block: int) -> IpcHandle:
        return decode_handle(self.call("export", block=block))

    def open(self, name: str, library: str | None, handle: IpcHandle) -> int:
        return self.call("open", name=name, library=library, handle=encode_handle(handle))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def stop(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)


def encode_handle(handle: IpcHandle) -> str:
    """Through msgpack, as it travels between learner and engine."""
    return msgspec.msgpack.encode(handle).hex()


def decode_handle(text: str) -> IpcHandle:
    return msgspec.msgpack.decode(bytes.fromhex(text), type=IpcHandle)


class _Server:
    """The child's end."""

    def __init__(self) -> None:
        self.backends: dict[tuple[str, str | None], Backend] = {}
        self.blocks: list[tuple[Backend, PersistentBlock]] = []
        self.victims: dict[int, int] = {}

    def backend(self, name: str, library: str | None) -> Backend:
        from tests.fakes.drivers.build import make_backend

        return self.backends.setdefault((name, library), make_backend(name, library))

    def _keep(self, backend: Backend, block: PersistentBlock) -> int:
        self.blocks.append((backend, block))
        return len(self.blocks) - 1

    def do_alloc(self, name: str, library: str | None, nbytes: int) -> int:
        backend = self.backend(name, library)
        return self._keep(backend, backend.alloc_persistent(nbytes))

    def do_export(self, block: int) -> str:
        backend, held = self.blocks[block]
        return encode_handle(backend.ipc_export(held))

    def do_open(self, name: str, library: str | None, handle: str) -> int:
        backend = self.backend(name, library)
        return self._keep(backend, backend.ipc_open(decode_handle(handle)))

    def do_close(self, block: int) -> None:
        self.blocks[block][1].close()

    def do_fill(self, block: int, seed: int) -> None:
        import torch

        backend, held = self.blocks[block]
        pattern = torch.arange(held.nbytes, dtype=torch.int64, device=held.tensor.device)
        held.tensor.copy_(((pattern * 131 + seed) % 251).to(torch.uint8))
        backend.synchronize()

    def do_write(self, block: int, offset: int, data: str) -> None:
        import torch

        backend, held = self.blocks[block]
        raw = torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8)
        held.tensor[offset : offset + raw.numel()].copy_(raw)
        backend.synchronize()

    def do_read(self, block: int, offset: int, nbytes: int) -> str:
        backend, held = self.blocks[block]
        backend.synchronize()
        return bytes(held.tensor[offset : offset + nbytes].cpu().numpy()).hex()

    def do_digest(self, block: int) -> int:
        backend, held = self.blocks[block]
        return backend.digest(held.tensor)

    def do_copy(self, dst: int, src: int) -> None:
        backend, held = self.blocks[dst]
        stream = backend.new_stream()
        backend.copy_async(held.tensor, self.blocks[src][1].tensor, stream)
        backend.synchronize(stream)

    def do_call(self, source: str) -> Any:
        """Evaluate `source` with the server as `self`: for checks that only one test needs."""
        scope: dict[str, Any] = {"self": self}
        exec(source, scope)
        return scope["result"]

    def do_victim(self, name: str, library: str | None, nbytes: int) -> dict[str, Any]:
        """Fork a process that exports a block and waits to be killed (it ends by itself when this one does)."""
        (from_child, to_parent), (from_parent, to_child) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(to_child)
            backend = self.backend(name, library)
            handle = encode_handle(backend.ipc_export(backend.alloc_persistent(nbytes)))
            os.write(to_parent, handle.encode())
            os.close(to_parent)
            os.read(from_parent, 1)
            os._exit(0)
        os.close(to_parent)
        os.close(from_parent)
        self.victims[pid] = to_child
        with os.fdopen(from_child) as reader:
            return {"pid": pid, "handle": reader.read()}

    def do_kill_victim(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(self.victims.pop(pid))


def main() -> None:
    server = _Server()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(server, "do_" + request.pop("op"))(**request)}
        except DeviceError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
