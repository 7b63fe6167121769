"""Types that several threads decode for the first time at once."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from weight_sync.messages import decode_typed

MANY_FIRST_TIMES = """
import sys, threading
import msgspec
from weight_sync.messages import decode_typed

sys.setswitchinterval(1e-6)
for _ in range(200):
    inner = [msgspec.defstruct(f"Inner{i}", [(f"f{j}", int) for j in range(20)]) for i in range(10)]
    outer = msgspec.defstruct("Outer", [(f"f{i}", kind) for i, kind in enumerate(inner)])
    other = msgspec.defstruct("Other", [(f"f{i}", kind) for i, kind in enumerate(inner)])
    data = msgspec.msgpack.encode({f"f{i}": {f"f{j}": j for j in range(20)} for i in range(10)})
    together = threading.Barrier(4)
    wrong = []

    def decode(kind):
        together.wait()
        try:
            assert decode_typed(data, kind).f9.f19 == 19
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=decode, args=(kind,)) for kind in (outer, other, outer, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
print("whole")
"""


def test_first_use_in_several_threads_does_not_end_the_process() -> None:
    """`msgspec.msgpack.decode(data, type=kind)` in its place dies of a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", MANY_FIRST_TIMES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stderr[-2000:]


def test_wrong_type_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError, match="int"):
        decode_typed(msgspec.msgpack.encode("text"), int)
