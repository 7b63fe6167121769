"""The trace: valid JSON at any time, across crashes and resumes, with bounded memory."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

from tests.fakes.full_disk import file_limit
from trainer.telemetry.trace import Tracer

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def events(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def add(tracer: Tracer, name: str, *, track: str = "a", **more: Any) -> None:
    tracer.add_span(track, name, start_s=0.0, end_s=1.0, **more)


def test_spans_have_start_duration_and_one_track_each(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "trace.json"
    tracer = Tracer(path, clock=clock)
    with contextlib.suppress(RuntimeError), tracer.span("learner", "step", step=3):
        clock.now += 0.25
        with tracer.span("sync", "pack"):
            clock.now += 0.5
        raise RuntimeError
    tracer.add_span("groups", "group 1", start_s=1.0, end_s=3.0, overlapping=True)
    tracer.add_span("groups", "group 2", start_s=2.0, end_s=4.0, overlapping=True)
    tracer.close()
    pack, step = events(path)
    assert (step["ts"], step["dur"], step["args"]) == (1000.0e6, 0.75e6, {"step": 3})
    assert (pack["ts"], pack["dur"]) == (1000.25e6, 0.5e6)
    names = {event["tid"]: event["args"]["name"] for event in events(path, "M") if event["name"] == "thread_name"}
    assert (names[step["tid"]], names[pack["tid"]]) == ("learner", "sync")
    assert [(e["id"], e["ts"]) for e in events(path, "b")] == [(1, 1e6), (2, 2e6)]
    assert [(e["id"], e["ts"]) for e in events(path, "e")] == [(1, 3e6), (2, 4e6)]


def test_the_file_is_valid_json_after_every_flush_and_memory_is_bounded(tmp_path: Path) -> None:
    path, clock = tmp_path / "trace.json", Clock()
    tracer = Tracer(path, clock=clock)
    assert json.loads(path.read_text()) == []
    most = 0
    for n in range(1000):
        add(tracer, f"n{n}")
        most = max(most, len(tracer._pending))
        if n % 100 == 0:
            assert len(events(path)) >= n - 256
    assert most <= 257
    clock.now += 2.0
    add(tracer, "late")
    assert len(events(path)) == 1001
    tracer.close()


def test_a_later_process_continues_a_whole_and_a_torn_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for n in range(3):
        tracer = Tracer(path)
        add(tracer, f"run{n}")
        tracer.close()
    assert [event["name"] for event in events(path)] == ["run0", "run1", "run2"]
    whole = path.read_bytes()
    for cut in [*range(0, len(whole), 7), *range(len(whole) - 20, len(whole))]:
        path.write_bytes(whole[:cut])
        tracer = Tracer(path)
        add(tracer, "again")
        tracer.close()
        names = [event["name"] for event in events(path)]
        assert names == [*(f"run{n}" for n in range(len(names) - 1)), "again"]


def test_every_process_of_a_run_has_its_own_numbers(tmp_path: Path) -> None:
    """The order in which tracks appear may differ after a resume, as where it does not evaluate at its start."""
    path = tmp_path / "trace.json"
    orders = (("learner", "groups"), ("evaluation", "groups", "learner"), ("groups",))
    for tracks in orders:
        tracer = Tracer(path)
        for track in tracks:
            add(tracer, f"a span of {track}", track=track, pid=77)
            add(tracer, f"another of {track}", track=track, overlapping=True)
        tracer.close()
    rows = [((event["pid"], event["tid"]), event["args"]["name"]) for event in events(path, "M")]
    assert len(dict(rows)) == len(rows), "no row is named twice"
    assert [name for (_, tid), name in rows if tid == 0] == ["start 1", "start 2", "start 3"]
    written = [*events(path), *events(path, "b"), *events(path, "e")]
    assert len(written) == 3 * sum(map(len, orders))
    assert all(event["name"].endswith(f" of {dict(rows)[event['pid'], event['tid']]}") for event in written)


def test_threads_do_not_tear_each_others_events_and_what_is_over_the_limit_or_late_is_counted(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "trace.json", max_events=2009)  # 2,000 spans, and the names of 4 tracks and the process

    def work(track: str) -> None:
        for n in range(500):
            add(tracer, str(n), track=track)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracer.num_dropped == 0
    for n in range(10):
        add(tracer, str(n), track="t0")
    tracer.close()
    add(tracer, "late")
    assert len(events(tmp_path / "trace.json")) == 2000 + 4
    assert tracer.num_dropped == 6 + 1


def test_a_full_disk_costs_the_events_that_it_refuses_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "trace.json", Clock()
    tracer = Tracer(path, clock=clock)
    for number in range(3):
        size = path.stat().st_size
        clock.now += 2.0
        with file_limit(size + 20) if number == 1 else contextlib.nullcontext():
            add(tracer, f"event {number}")
        assert number != 1 or path.stat().st_size == size
    tracer.close()
    assert [event["name"] for event in events(path)] == ["event 0", "event 2"]
    assert tracer.num_dropped == 1
    (tmp_path / "folder").mkdir()
    tracer = Tracer(tmp_path / "folder")
    add(tracer, "step 0")
    tracer.close()
    assert tracer.num_dropped == 1
    assert "the run continues without a trace" in caplog.text


def test_without_a_file_spans_are_in_the_log_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(None)
    with caplog.at_level("DEBUG"):
        tracer.add_span("learner", "step 3", start_s=100.0, end_s=100.25, tokens=7)
    assert caplog.messages == ["learner: step 3 took 0.250 s {'tokens': 7}"]
    tracer.close()
    assert tracer.num_dropped == 0
