"""A report comes whatever the driver does: hang, crash, or claim what it does not do."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.process_life import is_running, wait_until
from trainer.tools import doctor, doctor_probes
from trainer.tools.doctor import Outcome, run_probe
from weight_sync.device.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Callable

HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
def inside_the_driver():
    time.sleep(600)
inside_the_driver()
"""


def probe(code: str, *arguments: str, timeout_s: float = 60.0) -> Outcome:
    return run_probe([sys.executable, "-c", code, *arguments], dict(os.environ), timeout_s=timeout_s)


@pytest.mark.timing
def test_a_probe_that_hangs_is_reported_with_its_place_and_ended_with_its_children(tmp_path: Path) -> None:
    found = probe(HANGS, str(tmp_path / "pid"), timeout_s=3.0)
    assert (found.state, found.lines[0]) == ("FAILED", "not done within 3 s")
    assert any("in inside_the_driver" in line for line in found.lines)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(child), within_s=10.0, what="the child of a probe runs on")


def test_a_probe_that_crashes_or_ends_without_an_answer_is_reported() -> None:
    crashed = probe("import os\ndef call():\n  os.kill(os.getpid(), 11)\ncall()")
    assert (crashed.state, crashed.lines[0]) == ("FAILED", "crashed with SIGSEGV")
    assert any("in call" in line for line in crashed.lines)
    silent = probe("import sys; sys.stderr.write('the library says no'); sys.exit(3)")
    assert silent == Outcome("FAILED", ["ended with exit code 3", "the library says no"])


def test_what_a_library_prints_is_no_answer() -> None:
    code = """
import os
from trainer.tools import doctor_probes as probes
def noisy(device):
    os.write(1, b"a banner")
    return probes.Outcome("ok", [device])
probes.PROBES["noisy"] = noisy
probes.main(["noisy", "cpu"])
"""
    assert probe(code) == Outcome("ok", ["cpu"], {})


@pytest.mark.parametrize(
    ("name", "method", "wrong", "message"),
    [("memory", "copy_async", lambda *_: None, "bytes that were copied differ"),
     ("memory", "digest", lambda *_: 1, "or digests do"),
     ("ipc", "ipc_open", lambda backend, handle: backend.alloc_persistent(handle.nbytes), "reads other bytes"),
     ("ipc", "ipc_open", lambda *_: 1 / 0, "the second process: ZeroDivisionError"),
     ("ipc", "ipc_open", lambda *_: os._exit(3), r"the second process crashed \(exit code 3\)")],
)  # fmt: skip
def test_a_device_that_does_not_do_what_it_claims_fails(
    name: str, method: str, wrong: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = multiprocessing.get_context("fork")  # which takes the patches along
    monkeypatch.setattr(doctor_probes.multiprocessing, "get_context", lambda _: forked)
    monkeypatch.setattr(doctor_probes, "NBYTES", 1 << 20)
    monkeypatch.setattr(CpuBackend, method, wrong)
    with pytest.raises(doctor_probes.Wrong, match=message):
        doctor_probes.PROBES[name]("cpu")


def test_the_report_is_written_twice_shows_no_secret_and_counts_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hunter-22")
    monkeypatch.setenv("TANDEM_NODE", "left")
    outcomes = {
        "machine": Outcome("ok", [f"{Path.home()}/wheels on {socket.gethostname()}", "more"]),
        "network": Outcome("FAILED", ["refused hunter-22"]),
        "device": Outcome("FAILED"),
    }
    monkeypatch.setattr(doctor, "run_probe", lambda command, *_, **__: outcomes[command[4]])
    argv = ["--only", "machine", "network", "sync", "--out", str(tmp_path / "report")]
    assert doctor.main(argv) == 1
    report = capsys.readouterr().out
    assert report == (tmp_path / "report").read_text()
    assert "    RAY_AUTH_TOKEN=(not shown)\n    RAY" in report
    assert "    TANDEM_NODE=left\n" in report
    assert report.endswith(
        "ok       machine        ~/wheels on (this host)\n"
        "                        more\n"
        "FAILED   network        refused (not shown)\n"
        "FAILED   device         \n"
        "skipped  sync           there is no usable device\n"
        "2 probes failed\n"
    )
    outcomes |= {
        "network": Outcome("warning"),
        "device": Outcome("ok", [], {"device": "cpu", "environment": {}, "transports": []}),
    }
    assert doctor.main(argv) == 0
