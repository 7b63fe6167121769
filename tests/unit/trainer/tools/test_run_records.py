"""What is read in a run directory, whatever state that is in, and which of its steps count."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from msgspec import structs

from tests.fakes.played_run import NUM_STEPS, facts_of, play, played_config, write_run
from trainer.telemetry.metrics import RENAMED
from trainer.telemetry.session import append, describe
from trainer.tools.advise import diagnose, main
from trainer.tools.run_records import (
    TooFewSteps,
    idle_seconds,
    read_records,
    read_run,
    read_steps,
    read_trace,
    spans_of,
    steady,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

Capture = pytest.CaptureFixture[str]
FIRST, LAST = 4, NUM_STEPS
"""Steps that count where no engine is lost."""
TOTALS = {"engine/migrated_requests": 0, "discarded/failed_attempt_tokens": 0}
"""What the workers' reports add up to while nothing happens."""
SKIPPED = {"sync/replicas_skipped": 1, "sync/replicas_live": 3}


class Run:
    """The directory of a run with four engines and a learner that waits for them, and what may be changed in it."""

    def __init__(self, path: Path, *, with_idle: bool = True) -> None:
        self.path = path
        write_run(path, with_idle=with_idle)
        self.evaluates()
        self.change(range(1, LAST + 1), TOTALS)

    def evaluates(self, every: int = 0, *, at_start: bool = False, blocking: bool = False) -> None:
        config = yaml.safe_load((self.path / "config.yaml").read_text())
        config["trainer"] = {
            "eval_every": every, "eval_at_start": at_start, "eval_blocking": blocking, "groups_per_step": 8,
        }  # fmt: skip
        (self.path / "config.yaml").write_text(yaml.safe_dump(config))

    def write_evaluations(self, *ended: tuple[int, int]) -> None:
        """`ended`: version, and steps made when its evaluation ended."""
        lines = [json.dumps({"version": version, "step": step}) + "\n" for version, step in ended]
        (self.path / "evaluations.jsonl").write_text("".join([*lines, '{"vers']))

    def starts(self, *, device: str = "cuda", after: int | None = None) -> None:
        append(self.path / "environment.jsonl", describe(device=device, resumed_from_step=after))

    def forget(self, steps: Sequence[int], keys: Collection[str]) -> None:
        self._edit(steps, lambda one: {key: value for key, value in one.items() if key not in keys})

    def change(self, steps: Sequence[int], metrics: Mapping[str, float]) -> None:
        self._edit(steps, lambda one: {**one, **metrics})

    def _edit(self, steps: Sequence[int], edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        path = self.path / "metrics.jsonl"
        changed = [edit(one) if one["step"] in steps else one for one in read_records(path)]
        path.write_text("".join(json.dumps(one) + "\n" for one in changed))

    def counted(self) -> list[int]:
        return [line.step for line in read_run(self.path).lines]

    def left_out(self) -> list[int]:
        return sorted({*range(FIRST, LAST + 1)} - {*self.counted()})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_run_directory_becomes_advice(run: Run, capsys: Capture) -> None:
    assert main([str(run.path)]) == 0
    text = capsys.readouterr().out
    assert "The learner waits" in text and "learner.num_ranks=2 rollout.num_replicas=6" in text
    assert main([str(run.path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["verdict"] == "generation_bound"
    assert values["recommendation"]["keys"] == {"learner.num_ranks": 2, "rollout.num_replicas": 6}
    assert "What communication" in values["unknown"][-1]


def test_what_is_no_run_ends_with_its_reason(tmp_path: Path, capsys: Capture) -> None:
    def refusal(path: Path) -> str:
        assert main([str(path)]) == 2
        out, err = capsys.readouterr()
        assert not out
        return err

    assert "is not a directory" in refusal(tmp_path / "nowhere")
    assert "config.yaml cannot be read" in refusal(tmp_path)
    write_run(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*whole[:4], "{}\n", *whole[4:]]))
    assert "line 5" in refusal(tmp_path / "run")
    metrics.unlink()
    assert "metrics.jsonl cannot be read" in refusal(tmp_path / "run")


def test_too_few_steps_show_where_their_time_went_and_how_many_more_are_needed(run: Run, capsys: Capture) -> None:
    metrics = run.path / "metrics.jsonl"
    whole = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(whole[:4]))
    assert main([str(run.path)]) == 1
    out, err = capsys.readouterr()
    assert "4 steps since the start were recorded" in err and "2 more steps are needed for a diagnosis" in err
    assert out.startswith("So far 4 steps, the first ones included, 9.75 s each. Share of that time in which")
    assert "the learner waited for data" in out and "69.2%" in out
    assert main([str(run.path), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["verdict"], values["num_steps"], values["num_steps_missing"]) == (None, 4, 2)
    assert values["shares"]["learner_waits_for_data"] == pytest.approx(27 / 39)
    for number, missing in ((0, 6), (1, 5), (3, 3)):
        metrics.write_text("".join(whole[:number]))
        assert main([str(run.path)]) == 1
        out, err = capsys.readouterr()
        assert f"{missing} more steps are needed" in err and bool(out) == bool(number)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n{"st')
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_run_under_earlier_names_of_metrics_is_read_alike(run: Run) -> None:
    run.change([20], SKIPPED)
    run.change([30], {"engine/migrated_requests": 5, "buffer/oldest_wait_s": 1.0})
    before, path = read_run(run.path), run.path / "metrics.jsonl"
    earlier = {new: old for old, new in RENAMED.items()}
    lines = [{earlier.get(name, name): value for name, value in one.items()} for one in read_records(path)]
    assert len(RENAMED.keys() & lines[29].keys()) > 5
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert read_run(run.path) == before


# The first and the last steps


def test_steps_count_from_the_last_opening_of_slots_if_enough_are_left() -> None:
    def with_slots_opened_in(step: int) -> list[int]:
        lines = [structs.replace(line, num_slots=24 if line.step >= step else 16) for line in play(9.0, 3.0)[0]]
        return [line.step for line in steady(lines, max_staleness=2)[0]]

    assert with_slots_opened_in(20) == [*range(20, 41)]
    assert with_slots_opened_in(39) == [*range(5, 41)]


def test_the_last_steps_of_a_run_that_has_ended_do_not_count(run: Run) -> None:
    lines = play(9.0, 3.0)[0]
    assert [line.step for line in steady(lines, max_staleness=3, has_ended=True)[0]] == [*range(6, 38)]
    assert steady(lines, max_staleness=0, has_ended=True) == steady(lines, max_staleness=0)
    metrics = run.path / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:5]))
    (run.path / "summary.json").write_text('{"exit_reason": "completed", "steps": 5}')
    with pytest.raises(TooFewSteps, match=r"the last 1 empty it; 2 more steps are needed .* give a longer run"):
        run.counted()


@pytest.mark.parametrize(
    ("summary", "last"),
    [
        ('{"exit_reason": "completed", "steps": 40}', 39),
        ('{"exit_reason": "accuracy_reached", "steps": 40}', 40),
        ('{"exit_reason": "completed", "steps": 30}', 40),
        ("{", 40),
    ],
)
def test_a_summary_shows_that_the_run_has_ended(run: Run, summary: str, last: int) -> None:
    (run.path / "summary.json").write_text(summary)
    assert run.counted() == [*range(FIRST, last + 1)]


# Processes of a run


def test_the_device_is_that_of_the_latest_start(run: Run, capsys: Capture) -> None:
    def report() -> str:
        assert main([str(run.path)]) == 0
        return capsys.readouterr().out

    path = run.path / "config.yaml"
    path.write_text(path.read_text().replace("name: cuda", "name: auto"))
    assert "an accelerator is assumed" in report()
    run.starts(device="cpu")
    assert "share the cores of this machine" in report()
    run.starts()
    assert "rollout.num_replicas=6" in (found := report()) and "assumed" not in found


def test_what_was_before_a_resume_does_not_count(run: Run) -> None:
    run.starts(after=30)
    assert run.counted() == [*range(34, 41)]
    run.starts(after=38)
    with pytest.raises(
        TooFewSteps, match=r"2 steps since the start were recorded.*the 38 steps before the last resume"
    ):
        run.counted()


def test_a_resume_that_ended_before_its_first_step_does_not_count(run: Run) -> None:
    lines = play(9.0, 3.0)[0]

    def first_and_device(*resumed: int | None, startup_s: float) -> tuple[int, str]:
        """The last process that made steps began after step 20."""
        at_s = 100.0
        for line in lines:
            at_s = (startup_s if line.step == 21 else at_s) + line.step_s
            run.change([line.step], {"time_s": at_s})
        (run.path / "environment.jsonl").unlink(missing_ok=True)
        for number, step in enumerate(resumed):
            run.starts(device=f"device {number}", after=step)
        facts = read_run(run.path)
        return facts.lines[0].step, facts.device_name

    assert first_and_device(None, 20, startup_s=60.0) == (24, "device 1")
    assert first_and_device(None, 20, 30, startup_s=60.0) == (24, "device 1")
    assert first_and_device(None, 20, 35, 30, startup_s=500.0) == (24, "device 1")
    first_s = 100.0 + sum(line.step_s for line in lines[:20])
    for startup_s in (first_s - 0.9, first_s + 0.9):
        assert first_and_device(None, 20, startup_s=startup_s)[0] == 24, "started as long as the first until step 20"
    assert first_and_device(None, 20, 40, startup_s=60.0) == (24, "device 1"), "all was done already"


# Lost engines: an engine that was lost is not an idle one, so steps without it say nothing about who waits


@pytest.mark.parametrize("with_idle", [True, False])
def test_steps_with_a_lost_engine_do_not_count(tmp_path: Path, capsys: Capture, with_idle: bool) -> None:
    run, away_s = Run(tmp_path / "run", with_idle=with_idle), 120.0  # without, the trace says when they were idle

    def reported() -> tuple[Any, str]:
        assert main([str(run.path), "--json"]) == main([str(run.path)]) == 0
        out = capsys.readouterr().out
        values, end = json.JSONDecoder().raw_decode(out)
        return values, out[end:]

    before, text = reported()
    assert "lost engine" not in text
    slow = {
        "perf/step_s": away_s, "time/wait_for_batch_s": away_s - 3.0,
        **({"time/engines_idle_s": away_s / 2} if with_idle else {}),
    }  # fmt: skip
    run.change(range(20, 26), slow | SKIPPED)
    run.change([19], slow)
    run.change(range(22, LAST + 1), {"buffer/oldest_wait_s": 1000.0})
    values, text = reported()
    assert values["verdict"] == before["verdict"] == "generation_bound"
    assert values["num_lost_steps"] == 7, "it was lost in the step before those that report it"
    assert values["num_steps"] == before["num_steps"] - 7
    for name in ("step_s", "generation_s", "generation_full_s"):
        assert values[name] == pytest.approx(before[name], rel=0.01), name
    for name, share in before["shares"].items():
        assert values["shares"][name] == (None if share is None else pytest.approx(share, abs=0.01)), name
    assert values["recommendation"]["keys"] == before["recommendation"]["keys"]
    assert "7 steps with a lost engine are left out." in text


def test_a_run_without_an_engine_from_early_on_cannot_be_judged(run: Run) -> None:
    run.change(range(7, LAST + 1), SKIPPED)
    message = "35 of the others had a lost engine; 1 more step is needed .* let the run continue with all its engines"
    with pytest.raises(TooFewSteps, match=message):
        read_run(run.path)


def test_only_lost_steps_that_would_have_counted_are_reported(run: Run) -> None:
    run.change([1, 2, 3], SKIPPED)
    assert read_run(run.path).num_lost_steps == 0, "the first three are left out anyway"
    run.change([4], SKIPPED)
    assert read_run(run.path).num_lost_steps == 1
    run.change(range(1, LAST + 1), {"buffer/num_slots": 8})
    run.change(range(20, LAST + 1), {"buffer/num_slots": 16})
    run.change([10, 11, 30], SKIPPED)
    assert run.counted() == [*range(20, 29), *range(31, LAST + 1)]
    assert read_run(run.path).num_lost_steps == 2, "those before the slots were opened are left out anyway"
    run.change(range(30, LAST + 1), SKIPPED)
    run.change(range(20, 27), SKIPPED)
    assert run.counted() == [*range(5, 9), *range(12, 19), 27, 28], "too few since slots"
    assert read_run(run.path).num_lost_steps == LAST - 3 - len(run.counted())


def test_a_report_that_is_missing_once_is_no_loss(run: Run) -> None:
    # Requests that moved show an engine that was back before the next sync.
    run.change(range(20, LAST + 1), {"engine/migrated_requests": 5})
    assert run.left_out() == [20]
    run.change(range(20, LAST + 1), {"engine/migrated_requests": 0})
    # Tokens of a failed group may be reported after a line without a report.
    run.change(range(1, 19), {"buffer/failed": 0})
    run.change(range(19, LAST + 1), {"buffer/failed": 1, "discarded/failed_attempt_tokens": 500})
    run.change([19], {"discarded/failed_attempt_tokens": 0})
    run.forget([20], TOTALS)
    assert run.left_out() == []
    run.change(range(1, LAST + 1), {"buffer/failed": 0, **TOTALS})
    keys = ("engine/migrated_requests", "discarded/failed_attempt_tokens")
    run.change(range(10, LAST + 1), dict.fromkeys(keys, 500))
    assert run.left_out() == [10, 11, 12]
    run.change([20], dict.fromkeys(keys, 0))
    run.change([21, 31], dict.fromkeys(keys, 200))
    run.forget([30], keys)
    assert run.left_out() == [10, 11, 12], "one worker reported nothing, then both"
    run.change(range(32, LAST + 1), dict.fromkeys(keys, 600))
    assert run.left_out() == [10, 11, 12, 32, 33, 34]


def test_tokens_that_no_failed_group_explains_show_the_loss_of_the_only_engine(run: Run) -> None:
    run.change(range(20, LAST + 1), {"discarded/failed_attempt_tokens": 500})
    assert run.left_out() == [20, 21, 22], "with S = 1 there may be groups for one more step, and the next one waits"
    for step in (19, 20, 21):  # the worker may report its tokens a moment later, in the next line
        run.change(range(1, LAST + 1), {"buffer/failed": 0})
        run.change(range(step, LAST + 1), {"buffer/failed": 1})
        assert run.left_out() == []


# Evaluations beside training have an engine


def test_an_engine_that_an_evaluation_has_is_not_lost(run: Run) -> None:
    run.change(range(12, 15), SKIPPED)
    assert run.left_out() == [11, 12, 13, 14], "there is no evaluation"
    run.evaluates(every=10)
    run.write_evaluations((10, 12), (20, 21), (30, 31))
    assert run.left_out() == []
    run.change([12], {"sync/replicas_skipped": 2})
    assert run.left_out() == [11, 12], "an evaluation has one engine, and another was lost"
    run.change([12], SKIPPED)
    run.change([15], SKIPPED)
    assert run.left_out() == [14, 15], "the evaluation had ended"
    run.evaluates(every=10, blocking=True)
    assert run.left_out() == [11, 12, 13, 14, 15], "a learner that waits for the evaluation brings no weights meanwhile"


def test_an_evaluation_that_runs_is_not_recorded_yet(run: Run) -> None:
    run.change([LAST - 1, LAST], SKIPPED)
    run.evaluates(every=10)
    ended, lost = [(10, 12), (20, 22)], [LAST - 2, LAST - 1, LAST]
    for more, left_out in (
        ([], []),
        ([(30, 32)], lost),
        ([(30, LAST - 2)], []),
    ):  # one runs, none, one did
        run.write_evaluations(*ended, *more)
        assert run.left_out() == left_out
    run.change(range(2, LAST + 1), SKIPPED)
    run.evaluates(at_start=True)
    run.write_evaluations()
    assert run.left_out() == [], "that at the start may be the only one"
    run.change(range(10, LAST + 1), {"sync/replicas_skipped": 0})
    run.write_evaluations((0, 5))
    assert run.left_out() == [7, 8, 9], "it had ended before steps 8 and 9"


def test_evaluations_before_a_resume_are_not_those_after_it(run: Run) -> None:
    run.starts(after=13)
    run.change(range(14, LAST + 1), SKIPPED)
    run.evaluates(at_start=True)
    for before in [(0, 3)], [(0, 3), (10, 13)], [(0, 3), (10, 15)]:
        run.write_evaluations(*before)
        assert run.counted() == [*range(17, LAST + 1)], f"that at the start may still run {before}"
    run.write_evaluations((0, 3), (13, 20))
    assert run.counted() == [*range(17, 22)], "it had ended"
    run.change(range(14, LAST + 1), {"sync/replicas_skipped": 0})
    run.change([18, 25], SKIPPED)
    run.evaluates(every=10)
    run.write_evaluations((0, 3))
    assert [step for step in run.left_out() if step > 16] == [17, 18], "the next one is that of version 20"


def test_waits_beside_evaluations_ask_for_fewer_of_them_and_not_for_engines(run: Run, capsys: Capture) -> None:
    """Learning and generation take 4 s a step, at once. Every second step waits 10 s beside an evaluation."""
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    config |= {"rollout": {"num_replicas": 1, "tensor_parallel_size": 4}}
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    run.evaluates(every=2)
    (run.path / "trace.json").unlink()
    for step in range(1, LAST + 1):
        wait_s, evaluation_s = ((0.2, 0.0), (10.0, 10.0))[step % 2 - 1]
        run.change([step], {
            "perf/step_s": 4 + wait_s, "learner/step_s": 4.0, "time/wait_for_batch_s": wait_s,
            "time/wait_for_eval_s": evaluation_s, "time/engines_idle_s": 0.1, "time/backpressure_s": 0.0,
        })  # fmt: skip
    assert main([str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "evaluation_waits"
    assert found["recommendation"]["keys"] == {"trainer.eval_every": 4}
    assert found["recommendation"]["step_s"] == pytest.approx(9.1 - 5 / 2, rel=0.05)
    assert found["shares"]["learner_waits_for_data"] == pytest.approx(0.1 / 9.1, rel=0.1)
    assert found["shares"]["learner_waits_for_evaluation"] == pytest.approx(5 / 9.1, rel=0.05)
    assert found["generation_s"] == pytest.approx(4.0, rel=0.05), "engines that answer an evaluation generate no groups"
    assert main([str(run.path)]) == 0
    text = capsys.readouterr().out
    assert "and for evaluations" in text and "Advice: trainer.eval_every=4" in text
    assert "task.eval_size" in text and "a second engine" in text
    # An evaluation that has one of four engines causes a quarter of the wait.
    (line, *_) = read_steps(run.path, num_replicas=4)[::-1]
    assert (line.evaluation_wait_s, line.data_wait_s) == (2.5, 7.5)


# The trace


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_idle_time_agrees_with_looking_every_moment(num_replicas: int) -> None:
    spans = [(0, 4), (2, 9), (2, 5), (12, 20), (19, 30)]
    slow = sum(max(0, num_replicas - sum(a <= t < b for a, b in spans)) / num_replicas for t in range(30))
    floats = [(float(a), float(b)) for a, b in spans]
    assert idle_seconds(floats, (0.0, 30.0), num_replicas=num_replicas) == pytest.approx(slow)


@pytest.mark.parametrize("bounds", [(9.0, 3.0), (3.0, 9.0)])
def test_the_trace_shows_what_older_metrics_do_not(tmp_path: Path, bounds: tuple[float, float]) -> None:
    written = write_run(tmp_path / "run", generate_s=bounds[0], learn_s=bounds[1], with_idle=False)
    facts = read_run(tmp_path / "run")
    assert facts.trace is not None
    assert facts.trace.generation_full_s == pytest.approx(bounds[0], rel=0.02)
    traced, direct = diagnose(facts), diagnose(facts_of(steady(written, max_staleness=1)[0]))
    assert traced.shares.engines_idle == pytest.approx(direct.shares.engines_idle, abs=0.02)
    assert traced.verdict == direct.verdict


def test_the_full_rate_is_that_of_tokens_while_enough_groups_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    facts = facts_of(steady(write_run(run_dir), max_staleness=1)[0])
    text = (run_dir / "trace.json").read_text()
    short, long = '"tokens":10}', '"tokens":40}'
    assert text.count(short) == text.count(long) == 40

    def full_s(groups_per_step: int, text: str = text, *, has_ended: bool = False) -> float | None:
        (run_dir / "trace.json").write_text(text)
        cfg = played_config(trainer={"groups_per_step": groups_per_step})
        found = read_trace(run_dir, replace(facts, cfg=cfg, has_ended=has_ended))
        assert found is not None
        return found.generation_full_s

    def is_end_of_a_last_group(line: str) -> bool:
        return '"ph":"e"' in line and any(f'"group {number}"' in line for number in range(4 * 39, 4 * 40))

    assert full_s(8) == pytest.approx(9.0), "four at once are half of eight"
    assert full_s(2) == pytest.approx(9.0), "two of four are filtered, and have to be generated, too"
    assert full_s(9) is None
    assert full_s(8, text.replace(short, "}")) is None, "of a version that did not count tokens"
    assert full_s(8, text.replace(short, '"tokens":0}')) == pytest.approx(9.0), "an agent may answer without any"
    running = "\n".join(line for line in text.splitlines() if not is_end_of_a_last_group(line))
    assert full_s(8, running) == pytest.approx(9.0)
    assert full_s(8, running, has_ended=True) != pytest.approx(9.0, rel=0.01)


def test_torn_events_are_skipped_and_a_track_of_one_process_is_not_that_of_another() -> None:
    """Process 1 was killed within group 1; process 2 has other tracks first."""
    events = [
        "[",
        '{"name":"process_name","ph":"M","args":{"name":"start 1"},"pid":1,"tid":0},',
        '{"name":"thread_name","ph":"M","args":{"name":"groups"},"pid":1,"tid":1},',
        '{"name":"group 0","ph":"b","id":1,"ts":1000000,"pid":1,"tid":1},',
        '{"name":"group 1","ph":"b","id":2,"ts":1000000,"pid":1,"tid":1},',
        '{"name":"group 0","ph":"e","id":1,"ts":3000000,"pid":1,"tid":1},',
        '{"name":"thread_name","ph":"M","args":{"name":"evaluation"},"pid":2,"tid":1},',
        '{"name":"thread_name","ph":"M","args":{"name":"groups"},"pid":2,"tid":2},',
        '{"name":"group 1","ph":"e","id":2,"ts":9000000,"pid":2,"tid":1},',
        '{"name":"late","ph":"X","ts":1000000,"dur":1000000,"pid":1,"tid":1},',
        '{"name":"gro',
    ]
    found = [(span.track, span.name, span.begin_s, span.end_s) for span in spans_of(line.encode() for line in events)]
    assert found == [("groups", "group 0", 1.0, 3.0), ("groups", "late", 1.0, 2.0)]
