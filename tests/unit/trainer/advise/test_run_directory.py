"""What `python -m trainer.advise` reads in a run directory, whatever state that is in."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.unit.trainer.advise.test_advise import SETUP, play
from trainer.config.convert import to_plain
from trainer.config.schema import RunConfig
from trainer.telemetry.session import append, describe
from trainer.telemetry.trace import Tracer
from trainer.tools.advise import diagnose, main
from trainer.tools.run_records import idle_seconds, read_counted, read_lines, read_trace, spans_of, steady

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.tools.run_records import StepLine


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_idle_time_agrees_with_looking_every_moment(num_replicas: int) -> None:
    spans = [(0, 4), (2, 9), (2, 5), (12, 20), (19, 30)]
    slow = sum(
        max(0, num_replicas - sum(a <= t < b for a, b in spans)) / num_replicas for t in range(30)
    )  # fmt: skip
    assert idle_seconds([(float(a), float(b)) for a, b in spans], (0.0, 30.0), num_replicas=num_replicas) == (
        pytest.approx(slow)
    )


def write_run(
    run_dir: Path, *, generate_s: float = 9.0, learn_s: float = 3.0, with_idle: bool = True
) -> list[StepLine]:
    run_dir.mkdir()
    lines, generations, trainings = play(generate_s, learn_s)
    data: dict[str, Any] = to_plain(RunConfig())
    data["learner"]["num_ranks"], data["rollout"]["num_replicas"], data["from_another_version"] = 4, 4, 1
    data["device"]["name"] = "cuda"
    (run_dir / "config.yaml").write_text(yaml.safe_dump(data))
    with (run_dir / "metrics.jsonl").open("w") as file:
        for line in lines:
            record: dict[str, Any] = {
                "step": line.step, "perf/step_s": line.step_s, "learner/step_s": line.learner_s,
                "wait/learner_for_data_s": line.data_wait_s, "wait/learner_for_sync_s": line.sync_wait_s,
                "sync/pack_s": line.pack_s, "buffer/forced_wait_s": line.forced_wait_s,
            }  # fmt: skip
            if with_idle:
                record |= {"wait/engines_idle_s": line.engines_idle_s, "wait/producer_for_slots_s": line.slot_wait_s}
            file.write(json.dumps(record) + "\n")
        file.write('{"step": 99, "perf/st')
    tracer = Tracer(run_dir / "trace.json")
    for k, ((a, b), (c, d)) in enumerate(zip(generations, trainings, strict=True)):
        for replica in range(4):
            name = f"group {4 * k + replica}"
            tokens = 10 * (replica + 1)
            tracer.add_span("groups", name, start_s=1e9 + a, end_s=1e9 + b, overlapping=True, tokens=tokens)
        tracer.add_span("learner", f"step {k}", start_s=1e9 + c, end_s=1e9 + d)
    tracer.close()
    return lines


@pytest.mark.parametrize("bounds", [(9.0, 3.0), (3.0, 9.0)])
def test_the_trace_tells_what_older_metrics_do_not(tmp_path: Path, bounds: tuple[float, float]) -> None:
    written = write_run(tmp_path / "run", generate_s=bounds[0], learn_s=bounds[1], with_idle=False)
    lines = steady(read_lines(tmp_path / "run", SETUP), max_staleness=1).lines
    trace = read_trace(tmp_path / "run", lines, SETUP)
    assert trace is not None
    assert trace.generation_full_s == pytest.approx(bounds[0], rel=0.02)
    told = diagnose(lines, SETUP, trace=trace).findings
    direct = diagnose(steady(written, max_staleness=1).lines, SETUP, trace=None).findings
    assert told.shares.engines_idle == pytest.approx(direct.shares.engines_idle, abs=0.02)
    assert told.verdict == direct.verdict


def test_a_run_directory_becomes_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "The learner waits" in text
    assert "learner.num_ranks=2 rollout.num_replicas=6" in text
    assert main([str(tmp_path / "run"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["verdict"] == "learner_waits"
    assert values["recommendation"]["keys"] == {"learner.num_ranks": 2, "rollout.num_replicas": 6}


def test_the_full_rate_is_that_of_tokens_while_enough_groups_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lines = steady(write_run(run_dir), max_staleness=1).lines
    text = (run_dir / "trace.json").read_text()
    short, long = '"tokens":10}', '"tokens":40}'
    assert text.count(short) == text.count(long) == 40

    def full_s(groups_per_step: int, text: str = text, **setup: Any) -> float | None:
        (run_dir / "trace.json").write_text(text)
        found = read_trace(run_dir, lines, replace(SETUP, groups_per_step=groups_per_step, **setup))
        assert found is not None
        return found.generation_full_s

    assert full_s(8) == pytest.approx(9.0), "four at once are half of eight"
    assert full_s(2) == pytest.approx(9.0), "two of four are filtered, and have to be generated, too"
    assert full_s(9) is None
    assert full_s(8, text.replace(short, "}")) is None, "of a version that did not count tokens"
    assert full_s(8, text.replace(short, '"tokens":0}')) == pytest.approx(9.0), "an agent may answer without any"
    # The groups of the last step have not ended yet.
    begun = "\n".join(line for line in text.splitlines() if not ('"ph":"e"' in line and last_groups(line)))
    assert full_s(8, begun) == pytest.approx(9.0)
    assert full_s(8, begun, has_ended=True) != pytest.approx(9.0, rel=0.01)


def last_groups(line: str) -> bool:
    return any(f'"group {number}"' in line for number in range(4 * 39, 4 * 40))


@pytest.mark.parametrize(
    ("summary", "last"),
    [
        ('{"exit_reason": "completed", "steps": 40}', 39),
        ('{"exit_reason": "accuracy_reached", "steps": 40}', 40),
        ('{"exit_reason": "completed", "steps": 30}', 40),
        ("{", 40),
        (None, 40),
    ],
)
def test_a_summary_tells_that_the_run_is_over(
    tmp_path: Path, summary: str | None, last: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    if summary is not None:
        (tmp_path / "run" / "summary.json").write_text(summary)
    assert main([str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == last - 3


def test_the_run_says_on_what_device_it_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir)
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("name: cuda", "name: auto"))
    assert main([str(run_dir)]) == 0
    assert "an accelerator is assumed" in capsys.readouterr().out
    append(run_dir / "environment.jsonl", describe(device="cpu", resumed_from_step=None))
    assert main([str(run_dir)]) == 0
    assert "share the cores of this machine" in capsys.readouterr().out
    append(run_dir / "environment.jsonl", describe(device="cuda", resumed_from_step=None))
    assert main([str(run_dir)]) == 0
    found = capsys.readouterr().out
    assert "rollout.num_replicas=6" in found
    assert "assumed" not in found


def test_what_was_before_a_resume_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir)
    append(run_dir / "environment.jsonl", describe(device="cuda", resumed_from_step=30))
    assert main([str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 10 - 3
    append(run_dir / "environment.jsonl", describe(device="cuda", resumed_from_step=38))
    assert main([str(run_dir)]) == 1
    assert "2 steps since the start were recorded" in capsys.readouterr().err


def test_a_resume_that_ended_before_its_first_step_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    lines = write_run(run_dir)

    def told(*resumed: int | None, startup_s: float) -> dict[str, Any]:
        """The last process that made steps began behind step 20."""
        metrics, at_s = run_dir / "metrics.jsonl", 100.0
        records = [json.loads(text) for text in metrics.read_text().splitlines()[:40]]
        for record, line in zip(records, lines, strict=True):
            at_s = (startup_s if line.step == 21 else at_s) + line.step_s
            record["time_s"] = at_s
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        (run_dir / "environment.jsonl").unlink(missing_ok=True)
        for number, step in enumerate(resumed):
            append(run_dir / "environment.jsonl", describe(device=f"device {number}", resumed_from_step=step))
        assert main([str(run_dir), "--json"]) == 0
        capsys.readouterr()
        counted = read_counted(run_dir)
        return {"first": counted.lines[0].step, "device": counted.setup.device_name}

    assert told(None, 20, startup_s=60.0) == {"first": 24, "device": "device 1"}
    assert told(None, 20, 30, startup_s=60.0) == {"first": 24, "device": "device 1"}
    assert told(None, 20, 35, 30, startup_s=500.0) == {"first": 24, "device": "device 1"}
    first_s = 100.0 + sum(line.step_s for line in lines[:20])
    for startup_s in (first_s - 0.9, first_s + 0.9):
        assert told(None, 20, startup_s=startup_s)["first"] == 24, "took as long to start as the first until step 20"
    assert told(None, 20, 40, startup_s=60.0) == {"first": 24, "device": "device 1"}, "all was done already"


def test_what_is_no_run_ends_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "config.yaml cannot be read" in capsys.readouterr().err
    write_run(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(whole[:4]))
    assert main([str(tmp_path / "run")]) == 1
    assert "let the run go on" in capsys.readouterr().err
    metrics.write_text("".join([*whole[:4], "{}\n", *whole[4:]]))
    assert main([str(tmp_path / "run")]) == 2
    assert "line 5" in capsys.readouterr().err
    metrics.unlink()
    assert main([str(tmp_path / "run")]) == 2
    assert "metrics.jsonl cannot be read" in capsys.readouterr().err


def test_torn_and_unfinished_events_of_a_trace_are_passed_over() -> None:
    events = [
        "[",
        '{"name":"process_name","ph":"M","args":{"name":"start 1"},"pid":1,"tid":0},',
        '{"name":"thread_name","ph":"M","args":{"name":"groups"},"pid":1,"tid":1},',
        '{"name":"group 0","ph":"b","id":1,"ts":1000000,"pid":1,"tid":1},',
        '{"name":"group 1","ph":"b","id":2,"ts":1000000,"pid":1,"tid":1},',
        '{"name":"group 0","ph":"e","id":1,"ts":3000000,"pid":1,"tid":1},',
        '{"name":"gro',
    ]
    (span,) = spans_of(events)
    assert (span.track, span.name, span.begin_s, span.end_s) == ("groups", "group 0", 1.0, 3.0)


def test_a_track_of_one_process_is_not_that_of_another() -> None:
    """The one before was killed within group 0; the one that goes on has other tracks first."""
    events = [
        '{"name":"thread_name","ph":"M","args":{"name":"groups"},"pid":1,"tid":1},',
        '{"name":"group 0","ph":"b","id":1,"ts":1000000,"pid":1,"tid":1},',
        '{"name":"thread_name","ph":"M","args":{"name":"evaluation"},"pid":2,"tid":1},',
        '{"name":"thread_name","ph":"M","args":{"name":"groups"},"pid":2,"tid":2},',
        '{"name":"group 0","ph":"e","id":1,"ts":9000000,"pid":2,"tid":1},',
        '{"name":"late","ph":"X","ts":1000000,"dur":1000000,"pid":1,"tid":1},',
    ]
    assert [(span.track, span.name) for span in spans_of(events)] == [("groups", "late")]
