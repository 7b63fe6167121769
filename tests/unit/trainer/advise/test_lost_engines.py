"""An engine that was lost is not an idle one: steps without it say nothing about who waits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.unit.trainer.advise.test_run_directory import write_run
from trainer.telemetry.session import append, describe
from trainer.tools.advise import main
from trainer.tools.run_records import read_counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

AWAY_S = 120.0
FIRST, LAST = 4, 40
"""Steps that count where no engine is lost."""
TOTALS = {"engine/rescued_requests": 0, "discarded/attempt_tokens": 0}
"""What the workers' reports add up to while nothing happens."""


class Run:
    """Four engines, and a learner that waits for them."""

    def __init__(self, path: Path, *, with_idle: bool = True) -> None:
        self.path = path
        write_run(path, with_idle=with_idle)
        self.evaluates()
        self.change(range(1, LAST + 1), TOTALS)

    def evaluates(self, every: int = 0, *, at_start: bool = False, blocking: bool = False) -> None:
        config = yaml.safe_load((self.path / "config.yaml").read_text())
        config["trainer"] |= {"eval_every": every, "eval_at_start": at_start, "eval_blocking": blocking}
        config["trainer"]["groups_per_step"] = 8
        (self.path / "config.yaml").write_text(yaml.safe_dump(config))

    def write_evaluations(self, *spans: tuple[int, int]) -> None:
        """`spans`: version, and steps made when its evaluation ended."""
        lines = [json.dumps({"version": version, "step": step}) + "\n" for version, step in spans]
        (self.path / "evaluations.jsonl").write_text("".join([*lines, '{"vers']))

    def resumes(self, step: int) -> None:
        append(self.path / "environment.jsonl", describe(device="cuda", resumed_from_step=step))

    def forget(self, steps: Sequence[int], keys: Collection[str]) -> None:
        self._edit(steps, lambda one: {key: value for key, value in one.items() if key not in keys})

    def change(self, steps: Sequence[int], metrics: Mapping[str, float]) -> None:
        self._edit(steps, lambda one: {**one, **metrics})

    def _edit(self, steps: Sequence[int], edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        path = self.path / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        changed = [edit(one) if one["step"] in steps else one for one in records]
        path.write_text("".join(json.dumps(one) + "\n" for one in changed))

    def left_out(self) -> list[int]:
        return sorted({*range(FIRST, LAST + 1)} - {line.step for line in read_counted(self.path).lines})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


SLOW = {"perf/step_s": AWAY_S, "wait/learner_for_data_s": AWAY_S - 3.0, "wait/engines_idle_s": AWAY_S / 2}
"""A step of minutes in which engines have little to do."""
SKIPPED = {"sync/replicas_skipped": 1, "sync/replicas_live": 3}


@pytest.mark.parametrize("with_idle", [True, False])
def test_steps_with_a_lost_engine_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], with_idle: bool
) -> None:
    run = Run(tmp_path / "run", with_idle=with_idle)  # without, the trace tells

    def told() -> tuple[Any, str]:
        assert main([str(run.path), "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert main([str(run.path)]) == 0
        return values, capsys.readouterr().out

    before, text = told()
    assert "lost engine" not in text
    run.change(range(20, 26), SLOW | SKIPPED)
    run.change([19], SLOW)
    run.change(range(22, LAST + 1), {"buffer/forced_wait_s": 1000.0})
    values, text = told()
    assert values["verdict"] == before["verdict"] == "learner_waits"
    assert values["num_lost_steps"] == 7, "it was lost in the step before those that say so"
    assert values["num_steps"] == before["num_steps"] - 7
    for name in ("step_s", "generation_s", "generation_full_s"):
        assert values[name] == pytest.approx(before[name], rel=0.01), name
    for name, share in before["shares"].items():
        assert values["shares"][name] == (None if share is None else pytest.approx(share, abs=0.01)), name
    assert values["recommendation"]["keys"] == before["recommendation"]["keys"]
    assert "7 steps with a lost engine are left out." in text


def test_a_run_without_an_engine_from_early_on_cannot_be_judged(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.change(range(7, LAST + 1), SKIPPED)
    assert main([str(run.path)]) == 1
    assert (
        "35 of the others had a lost engine, and at least 3 more are needed; let the run go on with all its engines"
        in (capsys.readouterr().err)
    )


def test_only_lost_steps_that_would_have_counted_are_told_of(run: Run) -> None:
    run.change([1, 2, 3], SKIPPED)
    assert read_counted(run.path).num_lost_steps == 0, "the first three are left out anyway"
    run.change([4], SKIPPED)
    assert read_counted(run.path).num_lost_steps == 1
    run.change(range(1, LAST + 1), {"buffer/num_slots": 8})
    run.change(range(20, LAST + 1), {"buffer/num_slots": 16})
    run.change([10, 11, 30], SKIPPED)
    counted = read_counted(run.path)
    assert [line.step for line in counted.lines] == [*range(20, 29), *range(31, LAST + 1)]
    assert counted.num_lost_steps == 2, "those before the slots were opened are left out anyway"
    run.change(range(30, LAST + 1), SKIPPED)
    run.change(range(20, 27), SKIPPED)
    counted = read_counted(run.path)
    assert [line.step for line in counted.lines] == [*range(5, 9), *range(12, 19), 27, 28], "too few since slots"
    assert counted.num_lost_steps == LAST - 3 - len(counted.lines)


def test_a_report_that_is_missing_once_is_no_loss(run: Run) -> None:
    keys = ("engine/rescued_requests", "discarded/attempt_tokens")
    run.change(range(10, LAST + 1), dict.fromkeys(keys, 500))
    assert run.left_out() == [10, 11, 12]
    run.change([20], dict.fromkeys(keys, 0))
    run.change([21, 31], dict.fromkeys(keys, 200))
    run.forget([30], keys)
    assert run.left_out() == [10, 11, 12], "one worker told nothing, then both"
    run.change(range(32, LAST + 1), dict.fromkeys(keys, 600))
    assert run.left_out() == [10, 11, 12, 32, 33, 34]


def test_tokens_of_a_failed_group_may_be_told_after_a_line_without_a_report(run: Run) -> None:
    run.change(range(1, 19), {"buffer/failed": 0})
    run.change(range(19, LAST + 1), {"buffer/failed": 1, "discarded/attempt_tokens": 500})
    run.change([19], {"discarded/attempt_tokens": 0})
    run.forget([20], TOTALS)
    assert run.left_out() == []


def test_requests_that_went_on_elsewhere_tell_of_an_engine_that_was_back_before_the_next_sync(run: Run) -> None:
    run.change(range(20, LAST + 1), {"engine/rescued_requests": 5})
    assert run.left_out() == [20]


def test_tokens_that_no_failed_group_explains_tell_of_the_loss_of_the_only_engine(run: Run) -> None:
    run.change(range(20, LAST + 1), {"discarded/attempt_tokens": 500})
    assert run.left_out() == [20, 21, 22], "with S = 1 there may be groups for one more step, and the next one waits"
    for step in (19, 20, 21):  # the worker may tell of its tokens a moment later, in the next line
        run.change(range(1, LAST + 1), {"buffer/failed": 0})
        run.change(range(step, LAST + 1), {"buffer/failed": 1})
        assert run.left_out() == []


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


def test_an_evaluation_under_way_is_not_written_down_yet(run: Run) -> None:
    run.change([LAST - 1, LAST], SKIPPED)
    run.evaluates(every=10)
    run.write_evaluations((10, 12), (20, 22))
    assert run.left_out() == [], "that of version 30 still runs"
    run.write_evaluations((10, 12), (20, 22), (30, 32))
    assert run.left_out() == [LAST - 2, LAST - 1, LAST], "that of version 40 has not begun"
    run.write_evaluations((10, 12), (20, 22), (30, LAST - 2))
    assert run.left_out() == [], "it had just ended"


def test_the_evaluation_at_the_start_may_be_the_only_one(run: Run) -> None:
    run.change(range(2, LAST + 1), SKIPPED)
    run.evaluates(at_start=True)
    assert run.left_out() == []
    run.write_evaluations((0, 5))
    run.change(range(8, LAST + 1), {"sync/replicas_skipped": 0})
    assert run.left_out() == []
    run.change([8, 9], SKIPPED)
    assert run.left_out() == [7, 8, 9]


def test_a_resumed_run_may_be_in_the_evaluation_at_its_start(run: Run) -> None:
    run.resumes(13)
    run.change(range(14, LAST + 1), SKIPPED)
    run.evaluates(at_start=True)
    counted = [*range(17, LAST + 1)]
    for before in [(0, 3)], [(0, 3), (10, 13)], [(0, 3), (10, 15)]:
        run.write_evaluations(*before)
        assert [line.step for line in read_counted(run.path).lines] == counted, before
    run.write_evaluations((0, 3), (13, 20))
    assert [line.step for line in read_counted(run.path).lines] == [*range(17, 22)], "it had ended"


def test_a_resumed_run_does_not_make_up_for_evaluations_before_it(run: Run) -> None:
    run.resumes(13)
    run.change([18], SKIPPED)
    run.change([25], SKIPPED)
    run.evaluates(every=10)
    run.write_evaluations((0, 3))
    assert [step for step in run.left_out() if step > 16] == [17, 18], "the next one is that of version 20"
