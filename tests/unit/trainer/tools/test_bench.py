"""Run directory -> figures -> file of results -> table. The speeds are known: engines make 100 tokens/s, the learner
takes 4 s, and who waits for whom is written down."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from scripts import plot_bench
from tests.fakes.metric_names import METRICS
from tests.fakes.process_life import is_running, wait_until
from trainer import subprograms
from trainer.telemetry.trace import Tracer
from trainer.tools import bench
from trainer.tools.bench import (
    RunOutcome,
    WorkloadMismatch,
    examine,
    load_results,
    main,
    run_trainer,
    save_results,
)
from trainer.tools.bench_figures import (
    PER_STEP,
    BenchPlan,
    TooShort,
    figures_of,
    per_step,
    start_up,
    step_flops,
    timeline_of,
)
from trainer.tools.bench_workload import Case, Workload, attention_tokens, workload
from trainer.tools.run_records import Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Capture = pytest.CaptureFixture[str]
Steps = tuple[list[dict[str, Any]], list[Span]]
WORK = replace(
    workload("uniform", is_tiny=True),
    prompt_tokens=10, min_response_tokens=50, max_response_tokens=50, groups_per_step=2, group_size=2,
)  # fmt: skip
"""A group has 100 tokens, a step 200 generated and 240 trained ones."""
STEP_S, LEARN_S = 10.0, 4.0
SYNC = Case(name="sync 1+1", mode="sync", num_ranks=1, num_replicas=1, tensor_parallel_size=1)
PLAN = BenchPlan(work=WORK, case=SYNC, warmup=2, num_steps=4, peak_tflops=None)


def plan(*overrides: str, groups: int = 2, **case: Any) -> BenchPlan:
    work = replace(WORK, groups_per_step=groups)
    return replace(PLAN, work=work, case=replace(SYNC, **case, overrides=overrides))


ASYNC_1, ASYNC_2 = plan(mode="async"), plan("mode.max_staleness=2", mode="async")


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "perf/step_s": STEP_S, "learner/step_s": LEARN_S, "learner/num_tokens": 240.0,
        "learner/num_loss_tokens": 200.0, "time/wait_for_batch_s": 5.5, "time/wait_for_sync_s": 0.5,
        "time/engines_idle_s": 5.0, "sync/pause_s": 0.01 * step, "sync/end_to_end_s": 0.5, "sync/pull_s": 0.4,
        "staleness/mean": 0.5, "staleness/max": float(step % 2), "buffer/failed": 3, "discarded_tokens": 0,
        "perf/rollout_tokens_per_s": 20.0, "time/backpressure_s": 1.5, "length_bias/ks": 0.25, **changes,
    }  # fmt: skip


def run(
    *groups: tuple[float, float],
    num_steps: int = 6,
    more: Sequence[Span] = (),
    until: float = 1e9,
    changes: Mapping[str, float] = MappingProxyType({}),
) -> Steps:
    """Step k is trained in [10k + 6, 10k + 10]. `groups`: when each of its groups is with the engines, from 10k on; no
    group begins after `until`. `changes` are of every record."""
    spans = list(more)
    for k in range(num_steps):
        at = STEP_S * k
        spans += [
            Span(track="learner", name=f"step {k}", begin_s=at + 6, end_s=at + 10),
            Span(track="engine replica_0", name=f"paused for v{k}", begin_s=at, end_s=at + 0.1),
            Span(track="sync", name=f"sync v{k}", begin_s=at, end_s=at + 0.5),
            Span(track="sync", name=f"pull v{k} replica_0", begin_s=at, end_s=at + 0.4),
        ]
        for i, (begin, end) in enumerate(groups if at < until else ()):
            spans.append(Span("groups", f"group {len(groups) * k + i}", at + begin, at + end))
    return [record(k + 1, **changes) for k in range(num_steps)], spans


IN_TURN = (0.0, 1.0), (1.0, 4.0)
SYNC_RUN = run(*IN_TURN)


def changed(steps: Steps, **by_step: dict[str, Any]) -> Steps:
    """`s3={...}` changes the record of step 3."""
    return [one | by_step.get(f"s{one['step']}", {}) for one in steps[0]], steps[1]


def cut_off(num_steps: int) -> Steps:
    """With S = 2 and 8 steps to make. In the last two nothing is generated any more, and every number is another."""
    records, spans = run(*IN_TURN, num_steps=8, until=6 * STEP_S)
    other = ("perf/", "learner/", "time/", "sync/", "staleness/")
    for line in records[6:]:
        line |= {name: 7.0 * value for name, value in line.items() if name.startswith(other)}
    return records[:num_steps], [span for span in spans if span.end_s <= num_steps * STEP_S]


def shared_turns() -> Steps:
    """Every group is with the engines for two of their turns of 4 s, between which the learner has the devices."""
    records, spans = run((0, 14), (0, 14), num_steps=7)
    spans = [span for span in spans if span.track in ("learner", "groups")]
    for at in range(0, 70, 10):
        spans.append(Span("devices", "sleep", at + 4, at + 5))
        spans.append(Span("engine replica_0", "paused", at + 9.9, at + 10)._replace(name="paused for v1"))
    return records, spans


HANDOVER = {"devices/sleep_s": 1.0, "devices/onload_s": 0.5, "devices/offload_s": 0.25, "devices/free_frac": 0.9}
LONG = Span("groups", "group 90", -80.0, 120.0)
"""Half a token per second."""
FIGURES: dict[str, tuple[Steps, BenchPlan, dict[str, Any]]] = {
    "both bounds and their ratio come from the same run": (SYNC_RUN, PLAN, {
        "engines.tokens_per_s": 50, "engines.busy_frac": 0.4, "engines.groups_running": 0.4, "generation_s": 4,
        "learning_s": 4, "bound_s": 4, "ratio": 2.5, "strict_ratio": 2.5, "num_devices": 2, "mfu": None,
        "devices_change_hands_s": 0}),
    "prompts count once per response, over all devices": (
        SYNC_RUN, PLAN, {"tokens_per_step": 240, "tokens_per_s_per_device": 240 / 10 / 2}),
    "shared devices count once": (SYNC_RUN, plan(mode="colocated"), {"tokens_per_s_per_device": 24}),
    "the first steps do not count": (
        changed(SYNC_RUN, s1={"perf/step_s": 500.0, "learner/num_tokens": 1.0}, s6={"perf/step_s": 14.0}), PLAN,
        {"steps": (3, 6), "tokens_per_step": 240, "step_s.mean": 11, "step_s.min": 10, "step_s.max": 14}),
    # Groups that had not ended when the run was cut off left no trace, so two more steps are left out of the rate.
    **{f"of {made} of 8 steps the last S = 2 do not count": (cut_off(made), ASYNC_2, {
        "steps": (3, last), "step_s.max": STEP_S, "learning_s": LEARN_S, "engines_idle_s": 5,
        "engines.tokens_per_s": 50}) for made, last in ((5, 5), (6, 6), (7, 6), (8, 6))},
    "engines of a shared device sleep while the learner has it": (
        shared_turns(), plan("mode.max_staleness=1", mode="colocated"), {
        "engines.tokens_per_s": 50, "engines.full_tokens_per_s": 50, "generation_s": 4, "generation_full_s": 4,
        "engines.busy_frac": 0.4, "ratio": 2.5}),
    "moves of shared devices add up": (run(*IN_TURN, changes=HANDOVER), PLAN, {"devices_change_hands_s": 1.75}),
    "groups that never ended do not lower the rate": (
        run(*IN_TURN, until=45), ASYNC_1, {"engines.tokens_per_s": 50, "engines.busy_frac": 0.4}),
    "unless they should have ended": (run(*IN_TURN, until=45), PLAN, {"engines.busy_frac": 0.3}),
    "a group counts with the part inside": (
        run(*IN_TURN, more=[LONG]), PLAN, {"engines.busy_frac": 1, "engines.tokens_per_s": 20 + 0.5}),
    "the full rate leaves out the tail in which few groups run": (run((0, 1), (0, 5)), plan(groups=4), {
        "engines.full_tokens_per_s": 100 + 20, "engines.tokens_per_s": 200 / 5, "generation_full_s": 200 / 120}),
    "it is unknown if half a step's groups never run at once": (
        SYNC_RUN, plan(groups=8), {"generation_full_s": None, "strict_ratio": None}),
    "only the strict ratio sees a learner that waits for one straggler": (
        run((0, 5), (0, 5), (0, 5), (0, 10), changes={"learner/step_s": 6.0, "learner/num_loss_tokens": 400.0}),
        plan(groups=4),
        {"generation_s": 10, "ratio": 1, "generation_full_s": 400 / (3 * 20 + 10), "strict_ratio": 10 / 6}),
    "MFU is of the learner's devices while it computes": (
        SYNC_RUN, replace(plan(num_ranks=2), peak_tflops=1e-3),
        {"mfu": figures_of(*SYNC_RUN, PLAN)["model_tflop"] / LEARN_S / 2 / 1e-3}),
    "a prompt that responses share counts once in it": (
        run(*IN_TURN, changes={"learner/shared_tokens_frac": 0.1}), PLAN,
        {"model_tflop": step_flops(WORK, num_tokens=240, num_loss_tokens=200, num_shared_tokens=24,
                                   attention_tokens=attention_tokens(WORK, 6 * WORK.groups_per_step)) / 1e12}),
    "a model of the user's has no MFU": (
        SYNC_RUN, replace(plan("model.path=/models/own"), peak_tflops=1e-3), {"mfu": None}),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "given", "expected"), FIGURES.values(), ids=FIGURES)
def test_figures_are_those_of_the_steady_steps(steps: Steps, given: BenchPlan, expected: dict[str, Any]) -> None:
    found = figures_of(*steps, given)
    assert {name: reduce(dict.__getitem__, name.split("."), found) for name in expected} == {
        name: value if value is None else pytest.approx(value) for name, value in expected.items()
    }


def test_a_run_has_steps_before_and_after_those_that_count_and_a_short_one_is_refused() -> None:
    for given, total in ((PLAN, 6), (ASYNC_1, 7), (ASYNC_2, 8)):
        assert given.total_steps == total
        assert [step for step in range(1, total + 1) if given.counts(step)] == [3, 4, 5, 6]
    for num_steps in (0, 1, 2):
        with pytest.raises(TooShort, match=f"{num_steps} steps ended"):
            figures_of(*run(*IN_TURN, num_steps=num_steps), PLAN)
    with pytest.raises(TooShort, match="needs 4"):
        figures_of(*run(*IN_TURN, num_steps=3), ASYNC_1)


def test_every_step_is_kept_with_whether_it_counted_and_what_it_lacks_is_unknown() -> None:
    found = per_step([record(step) for step in range(1, 9)], ASYNC_2)
    assert [entry["step"] for entry in found if entry["is_counted"]] == [3, 4, 5, 6]
    assert (found[2]["generated_tokens"], found[2]["sync_pause_s"]) == (200, 0.03), "20 tokens per second"
    (other,) = per_step([{"step": 1, "perf/step_s": 2.0}], PLAN)
    assert (other["step_s"], other["length_bias_ks"], other["generated_tokens"]) == (2.0, None, None)
    assert set(PER_STEP.values()) | {"perf/rollout_tokens_per_s"} <= {row.name for row in METRICS}


def test_operations_are_those_of_the_matrices_and_of_causal_attention() -> None:
    work: Workload = replace(WORK, shape="tiny")
    # Per block: q, k, v, o of 64 x 64, gate, up, down of 64 x 128; two blocks; vocabulary 128.
    blocks, head = 2 * (4 * 64 * 64 + 3 * 64 * 128), 128 * 64
    found = step_flops(work, num_tokens=1000, num_loss_tokens=800, attention_tokens=50)
    assert found == 6 * (blocks * 1000 + head * 800 + 2 * 64 * 50 * 1000)
    shared = step_flops(work, num_tokens=1000, num_loss_tokens=800, attention_tokens=50, num_shared_tokens=70)
    assert found - shared == 6 * 70 * (blocks + 2 * 64 * work.prompt_tokens)


OUTPUT = (
    "starting Ray ...", "starting Ray ... 4.5 s", "loading ... failed after 2.0 s",
    "starting engines and learners ... 20.0 s", "step 1/6  reward 1", "stopping ... 9.0 s",
)  # fmt: skip


def test_the_start_up_adds_up_to_the_first_step() -> None:
    assert start_up(*SYNC_RUN, OUTPUT, started_at=-30.0) == {
        "to_first_prompt_s": 30.0, "to_first_step_s": 36.0, "phase: starting Ray": 4.5,
        "phase: starting engines and learners": 20.0, "checks and imports": 5.5, "first rollout": 6.0,
    }  # fmt: skip
    assert start_up([], [], OUTPUT, started_at=0.0) == {}


def test_the_timeline_begins_after_the_warm_up() -> None:
    found = timeline_of(*SYNC_RUN, PLAN)
    assert (found["seconds"], found["learner"]) == (40, [[6, 10], [16, 20], [26, 30], [36, 40]])
    assert found["running"][:4] == [[0, 1], [1, 1], [4, 0], [10, 1]]
    assert len(found["paused"]) == len(found["syncs"]) == 4
    assert timeline_of(*cut_off(8), ASYNC_2) == found
    assert timeline_of(*cut_off(8), replace(ASYNC_2, num_steps=1))["seconds"] == 10
    assert timeline_of(*run(*IN_TURN, num_steps=2), PLAN) == {}


# Run directories and results

W1 = workload("w1", is_tiny=True)
ENDED = RunOutcome(
    command=("python",), started_at=-30.0, wall_s=99.0, timeout_s=200.0, exit_code=0, timed_out=False, output=OUTPUT
)


def write_run(run_dir: Path, num_steps: int) -> None:
    records, spans = run(*IN_TURN, num_steps=num_steps)
    run_dir.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in records)
    (run_dir / "metrics.jsonl").write_text(text + '{"step": 99, "perf/st')  # killed while it wrote
    tracer = Tracer(run_dir / "trace.json")
    for span in spans:
        overlaps = span.track == "groups"
        tracer.add_span(span.track, span.name, start_s=span.begin_s, end_s=span.end_s, overlapping=overlaps)
    tracer.close()


@pytest.mark.parametrize(
    ("num_steps", "outcome", "problem", "steps"),
    [
        (6, {}, "", (3, 6)),
        (4, {"timed_out": True, "exit_code": 130}, "did not end within 200 s", (3, 4)),  # keeps what it got to
        (5, {}, "made only 5 of its 6 steps", (3, 5)),
        (1, {}, "no figures: 1 steps ended", None),
        (None, {}, "has no metrics or no trace", None),
    ],
)
def test_a_run_is_examined_from_its_directory(
    tmp_path: Path, num_steps: int | None, outcome: dict[str, Any], problem: str, steps: tuple[int, int] | None
) -> None:
    if num_steps is not None:
        write_run(tmp_path / "run", num_steps)
    found = examine(tmp_path / "run", ENDED._replace(**outcome), PLAN)
    assert problem in found["problem"] and bool(problem) == bool(found["problem"])
    assert steps == (None if found["figures"] is None else found["figures"]["steps"])
    assert len(found["per_step"]) == (0 if num_steps is None else num_steps)
    json.dumps(found)
    if num_steps == 6:
        assert found["figures"] == figures_of(*SYNC_RUN, PLAN)
        assert found["start_up"]["phase: starting Ray"] == 4.5


def test_results_of_several_calls_come_together_in_a_table(tmp_path: Path, capsys: Capture) -> None:
    def result(problem: str = "", **figures: Any) -> dict[str, Any]:
        known = figures_of(*SYNC_RUN, PLAN) | figures
        return {"problem": problem, "figures": known, "start_up": {}, "timeline": timeline_of(*SYNC_RUN, PLAN)}

    path = tmp_path / "deep" / "out.json"
    never_full, unequal = result(generation_full_s=None), result(generation_full_s=1.0, learning_s=8.0)
    failed = {"problem": "exit code 1: no memory", "figures": None, "start_up": {}, "timeline": {}}
    save_results(
        path, W1, {"one": result("first"), "never full": never_full, "unequal": unequal, "failed": failed}
    )  # fmt: skip
    save_results(path, W1, {**load_results(path, W1), "one": result()})  # of a later call
    assert main(["--out", str(path), "--show"]) == bench.EXIT_DONE, "what the workload is, the file says"
    header, one, *others, last = capsys.readouterr().out.splitlines()
    strict = header.index("strict")
    assert "10.00 (10.00-10.00)" in one and "2.50" in one.split()
    assert [line[strict:].split()[0] for line in (one, *others)] == ["2.50", "-", "1.25"]
    assert last == "FAILED failed: exit code 1: no memory"
    picture = tmp_path / "out.png"
    if importlib.util.find_spec("matplotlib") is not None:
        assert plot_bench.main([str(path), str(picture)]) == 0 and picture.read_bytes()[1:4] == b"PNG"
    save_results(path, W1, {"failed": failed})
    with pytest.raises(SystemExit):
        plot_bench.main([str(path), str(picture)])
    assert "has no case with figures" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"workload": {"name": "another"}, "runs": {}}', "[]", "{"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.json"
    path.write_text(content)
    with pytest.raises(WorkloadMismatch, match="choose another file"):
        load_results(path, W1)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--case fast:2+2", "MODE:SPLIT"),
        ("--case async:2+2 --steps 0", "must be finite and above 0"),
        ("--case async:2+2 --timeout-s nan", "must be finite and above 0"),
        ("--case async:2+2 --peak-tflops inf", "must be finite and above 0"),
        ("--case async:2+2 --set sync:a=1", "reaches no case"),
    ],
)
def test_a_wrong_command_line_starts_nothing(tmp_path: Path, arguments: str, message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out.json"), "--tiny", *arguments.split()])
    assert ended.value.code == bench.EXIT_USAGE
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# The processes of runs

DEAF = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""
"""Does not end when it is asked to, and has a child."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run in the place of `python -m trainer`."""
    words: list[str] = []
    monkeypatch.setattr(subprograms, "command", lambda module, *arguments: [sys.executable, "-c", *words])
    monkeypatch.setattr(bench, "TWO_SIGNALS_S", 0.1)
    monkeypatch.setattr(bench, "END_S", 0.1)
    return words


def test_a_run_that_does_not_end_in_time_is_killed_with_its_children(tmp_path: Path, program: list[str]) -> None:
    program.append(DEAF)
    outcome = run_trainer([], output=tmp_path / "output.txt", timeout_s=2.0)
    assert (outcome.timed_out, outcome.exit_code) == (True, -signal.SIGKILL)
    assert outcome.problem == "did not end within 2 s"
    (pid,) = map(int, outcome.output)
    wait_until(lambda: not is_running(pid), within_s=20.0, what="its child runs on")


def test_a_run_that_fails_is_reported_with_its_last_lines(tmp_path: Path, program: list[str]) -> None:
    program.append("print('one\\n\\ntwo'); raise SystemExit(3)")
    outcome = run_trainer([], output=tmp_path / "output.txt", timeout_s=30.0)
    assert (outcome.timed_out, outcome.problem) == (False, "exit code 3: one | two")
    program[:] = ["print('done')"]
    assert run_trainer([], output=tmp_path / "output.txt", timeout_s=30.0).problem == ""


def test_an_interrupt_leaves_no_run_behind(tmp_path: Path, program: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program.append("import signal; signal.pause()")
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_trainer([], output=tmp_path / "output.txt", timeout_s=30.0)
    assert started[0].returncode == -signal.SIGTERM
