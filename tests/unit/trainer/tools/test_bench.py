"""Figures of a run with known speeds: engines make 100 tokens/s, the learner takes 4 s, and who waits for whom is
written down; and what the benchmark makes of a run directory and of its file of results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.trainer_process import ROOT
from trainer.telemetry.metrics import METRICS
from trainer.telemetry.trace import Tracer
from trainer.tools.bench import (
    EXIT_DONE,
    EXIT_USAGE,
    WorkloadMismatch,
    can_plot,
    examine,
    load_results,
    main,
    plot,
    save_results,
    table,
)
from trainer.tools.bench_figures import (
    PER_STEP,
    BenchPlan,
    TooShort,
    engine_rate,
    figures_of,
    per_step,
    start_up,
    step_flops,
    strict_ratio,
    timeline_of,
)
from trainer.tools.bench_workload import Case, Workload, workload
from trainer.tools.run_process import RunOutcome
from trainer.tools.run_records import Span

if TYPE_CHECKING:
    from pathlib import Path

Capture = pytest.CaptureFixture[str]
WORK = replace(
    workload("uniform", is_tiny=True),
    prompt_tokens=10,
    min_response_tokens=50,
    max_response_tokens=50,
    groups_per_step=2,
    group_size=2,
)
"""A group has 100 tokens, a step 200 generated and 240 trained ones."""
STEP_S, LEARN_S, NUM_STEPS = 10.0, 4.0, 6
SYNC = Case(name="sync 1+1", mode="sync", num_ranks=1, num_replicas=1, tensor_parallel_size=1)
ASYNC_2 = replace(SYNC, name="async 1+1", mode="async", overrides=("mode.max_staleness=2",))
PLAN = BenchPlan(work=WORK, case=SYNC, warmup=2, num_steps=4, peak_tflops=None)


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "perf/step_s": STEP_S, "learner/step_s": LEARN_S, "learner/num_tokens": 240.0,
        "learner/num_loss_tokens": 200.0, "time/wait_for_batch_s": 5.5, "time/wait_for_sync_s": 0.5,
        "time/engines_idle_s": 5.0, "sync/pause_s": 0.01 * step, "sync/end_to_end_s": 0.5, "sync/pull_s": 0.4,
        "staleness/mean": 0.5, "staleness/max": float(step % 2), "buffer/failed": 3, "discarded_tokens": 0,
        "perf/rollout_tokens_per_s": 20.0, "time/backpressure_s": 1.5, "length_bias/ks": 0.25, **changes,
    }  # fmt: skip


def sync_run(num_steps: int = NUM_STEPS) -> tuple[list[dict[str, Any]], list[Span]]:
    """Step k: its two groups are generated one after the other in [10k, 10k + 4], trained in [10k + 6, 10k + 10]."""
    spans: list[Span] = []
    for k in range(num_steps):
        at = STEP_S * k
        spans += [
            Span(track="groups", name=f"group {2 * k}", begin_s=at, end_s=at + 1),
            Span(track="groups", name=f"group {2 * k + 1}", begin_s=at + 1, end_s=at + 4),
            Span(track="learner", name=f"step {k}", begin_s=at + 6, end_s=at + 10),
            Span(track="engine replica_0", name=f"paused for v{k}", begin_s=at, end_s=at + 0.1),
            Span(track="sync", name=f"sync v{k}", begin_s=at, end_s=at + 0.5),
            Span(track="sync", name=f"pull v{k} replica_0", begin_s=at, end_s=at + 0.4),
        ]
    return [record(k + 1) for k in range(num_steps)], spans


def test_bounds_and_their_ratio_come_from_the_same_run() -> None:
    found = figures_of(*sync_run(), PLAN)
    # 200 tokens in the 4 s in which the engine was busy.
    assert found["engines"]["tokens_per_s"] == pytest.approx(50)
    assert (found["generation_s"], found["learning_s"], found["bound_s"]) == (pytest.approx(4), 4, 4)
    assert found["ratio"] == pytest.approx(10 / 4)
    assert found["engines"]["busy_frac"] == pytest.approx(0.4)
    assert found["engines"]["groups_running"] == pytest.approx(0.4)
    # Prompts count once per response, over all devices.
    assert (found["tokens_per_step"], found["num_devices"]) == (240, 2)
    assert found["tokens_per_s_per_device"] == pytest.approx(240 / 10 / 2)
    shared = replace(SYNC, mode="colocated", num_ranks=1)
    assert figures_of(*sync_run(), replace(PLAN, case=shared))["tokens_per_s_per_device"] == pytest.approx(24)


def test_the_first_and_the_last_s_steps_do_not_count_and_a_short_run_says_so() -> None:
    for case, total in ((SYNC, 6), (replace(SYNC, mode="async"), 7), (ASYNC_2, 8)):
        plan = replace(PLAN, case=case)
        assert plan.total_steps == total
        assert [step for step in range(1, total + 1) if plan.counts(step)] == [3, 4, 5, 6]
    records, spans = sync_run()
    records[0] |= {"perf/step_s": 500.0, "learner/step_s": 100.0, "learner/num_tokens": 1.0}
    records[5] |= {"perf/step_s": 14.0}
    found = figures_of(records, spans, PLAN)
    assert (found["steps"], found["learning_s"], found["tokens_per_step"]) == ((3, 6), 4, 240)
    assert found["step_s"] == {"mean": 11, "min": 10, "max": 14}
    for num_steps in (0, 1, 2):
        with pytest.raises(TooShort, match=f"{num_steps} steps ended"):
            figures_of(*sync_run(num_steps), PLAN)
    with pytest.raises(TooShort, match="needs 4"):
        figures_of(*sync_run(3), replace(PLAN, case=replace(SYNC, mode="async")))


def test_groups_that_span_turns_on_shared_devices_take_no_time_while_engines_sleep() -> None:
    """Every group is with the engines for two of their turns of 4 s, between which the learner has the devices."""
    records, spans = sync_run(7)
    shared = replace(SYNC, name="shared", mode="colocated", num_replicas=1, overrides=("mode.max_staleness=1",))
    turns: list[Span] = []
    for k in range(7):
        at = STEP_S * k
        turns += [
            Span(track="devices", name="sleep", begin_s=at + 4, end_s=at + 5),
            Span(track="groups", name=f"group {2 * k}", begin_s=at, end_s=at + 14),
            Span(track="groups", name=f"group {2 * k + 1}", begin_s=at, end_s=at + 14),
            Span(track="engine replica_0", name=f"paused for v{k + 1}", begin_s=at + 9.9, end_s=at + 10),
        ]
    spans = [span for span in spans if span.track == "learner"] + turns
    found = figures_of(records, spans, replace(PLAN, case=shared))
    # Always four groups, which together make 200 tokens in 4 s.
    assert found["engines"]["tokens_per_s"] == pytest.approx(50)
    assert found["engines"]["full_tokens_per_s"] == pytest.approx(50)
    assert (found["generation_s"], found["generation_full_s"]) == (pytest.approx(4), pytest.approx(4))
    assert found["engines"]["busy_frac"] == pytest.approx(0.4)
    assert found["ratio"] == pytest.approx(10 / 4)


def run_that_empties() -> tuple[list[dict[str, Any]], list[Span]]:
    """S = 2, all 8 steps made. In the last two nothing is generated any more, and every number is another."""
    records, spans = sync_run(8)
    other = ("perf/", "learner/", "time/", "sync/", "staleness/")
    for line in records[6:]:
        line |= {name: 7.0 * value for name, value in line.items() if name.startswith(other)}
    return records, [s for s in spans if not (s.track == "groups" and s.begin_s >= 6 * STEP_S)]


def test_the_last_steps_of_a_run_do_not_count() -> None:
    varied = replace(PLAN, work=replace(WORK, max_response_tokens=4096))
    found = figures_of(*run_that_empties(), replace(varied, case=ASYNC_2))
    assert found == figures_of(*sync_run(6), varied)
    assert found["steps"] == (3, 6)


@pytest.mark.parametrize(("num_steps", "last"), [(5, 5), (6, 6), (7, 6), (8, 6)])
def test_a_run_that_was_cut_off_keeps_all_steps_before_the_last_s(num_steps: int, last: int) -> None:
    records, spans = run_that_empties()
    ends_s = num_steps * STEP_S
    found = figures_of(records[:num_steps], [s for s in spans if s.end_s <= ends_s], replace(PLAN, case=ASYNC_2))
    assert found["steps"] == (3, last)
    assert (found["step_s"]["max"], found["learning_s"], found["engines_idle_s"]) == (STEP_S, LEARN_S, 5.0)
    # Groups that had not ended then left no trace, so two more steps are left out of the rate.
    assert found["engines"]["tokens_per_s"] == pytest.approx(50)


def test_shared_devices_that_change_hands_take_the_sum_of_their_moves() -> None:
    records, spans = sync_run()
    assert figures_of(records, spans, PLAN)["devices_change_hands_s"] == 0
    for line in records:
        line |= {"devices/sleep_s": 1.0, "devices/onload_s": 0.5, "devices/offload_s": 0.25, "devices/free_frac": 0.9}
    assert figures_of(records, spans, PLAN)["devices_change_hands_s"] == 1.75


def test_every_step_is_kept_with_whether_it_counted_and_what_it_lacks_is_unknown() -> None:
    found = per_step([record(step) for step in range(1, 9)], replace(PLAN, case=ASYNC_2))
    assert [entry["step"] for entry in found if entry["is_counted"]] == [3, 4, 5, 6]
    assert (found[2]["generated_tokens"], found[2]["sync_pause_s"]) == (200, 0.03), "20 tokens per second"
    (other,) = per_step([{"step": 1, "perf/step_s": 2.0}], PLAN)
    assert (other["step_s"], other["length_bias_ks"], other["generated_tokens"]) == (2.0, None, None)
    assert set(PER_STEP.values()) | {"perf/rollout_tokens_per_s"} <= {row.name for row in METRICS}


def test_groups_that_never_ended_do_not_lower_the_rate() -> None:
    """S = 1: what runs when the run ends leaves no trace, though the engines were busy with it."""
    records, spans = sync_run()
    asynchronous = replace(PLAN, case=replace(SYNC, mode="async"))
    ended = [s for s in spans if not (s.track == "groups" and s.begin_s >= STEP_S * (NUM_STEPS - 1))]
    assert engine_rate(records, ended, asynchronous)["tokens_per_s"] == pytest.approx(50)
    assert engine_rate(records, ended, asynchronous)["busy_frac"] == pytest.approx(0.4)
    assert engine_rate(records, ended, PLAN)["busy_frac"] < 0.4


def test_a_group_counts_with_the_part_that_lies_within() -> None:
    records, spans = sync_run()
    spans.append(Span(track="groups", name="group 90", begin_s=-80.0, end_s=120.0))  # half a token per second
    found = engine_rate(records, spans, PLAN)
    assert found["busy_frac"] == 1
    assert found["tokens_per_s"] == pytest.approx((4 * 200 + 40 * 0.5) / 40)


def test_the_full_rate_leaves_out_the_tail_in_which_few_groups_run() -> None:
    records, spans = sync_run()
    four = replace(PLAN, work=replace(WORK, groups_per_step=4))
    spans = [s for s in spans if s.track != "groups"]
    for k in range(NUM_STEPS):
        at = STEP_S * k
        spans.append(Span(track="groups", name=f"group {2 * k}", begin_s=at, end_s=at + 1))
        spans.append(Span(track="groups", name=f"group {2 * k + 1}", begin_s=at, end_s=at + 5))
    found = figures_of(records, spans, four)
    assert found["engines"]["full_tokens_per_s"] == pytest.approx(100 + 20)  # both run
    assert found["engines"]["tokens_per_s"] == pytest.approx(200 / 5)
    assert found["generation_full_s"] == pytest.approx(200 / 120)
    many = replace(PLAN, work=replace(WORK, groups_per_step=8))
    assert figures_of(records, spans, many)["generation_full_s"] is None


def test_only_the_strict_ratio_sees_a_learner_that_waits_for_one_straggler() -> None:
    """Three groups take 5 s and one takes all 10: the engine is never empty, the learner waits 4 s of each step."""
    records = [record(k + 1, **{"learner/step_s": 6.0, "learner/num_loss_tokens": 400.0}) for k in range(NUM_STEPS)]
    spans = [s for s in sync_run()[1] if s.track != "groups"]
    for k in range(NUM_STEPS):
        at = STEP_S * k
        spans += [Span(track="groups", name=f"group {4 * k + i}", begin_s=at, end_s=at + 5) for i in range(3)]
        spans.append(Span(track="groups", name=f"group {4 * k + 3}", begin_s=at, end_s=at + 10))
    found = figures_of(records, spans, replace(PLAN, work=replace(WORK, groups_per_step=4)))
    assert (found["generation_s"], found["ratio"]) == (pytest.approx(10), pytest.approx(1))
    assert found["generation_full_s"] == pytest.approx(400 / (3 * 20 + 10))
    assert found["strict_ratio"] == pytest.approx(10 / 6)


def test_the_strict_ratio_is_of_the_larger_side_at_the_full_rate_and_unknown_without_that_rate() -> None:
    # One group of two is half: 50 tokens/s, so 4 s as long as the learner computes.
    assert figures_of(*sync_run(), PLAN)["strict_ratio"] == pytest.approx(10 / 4)
    for full_s, expected in ((8.0, 10 / 8), (3.0, 10 / 4), (None, None)):
        assert strict_ratio(10.0, generation_full_s=full_s, learning_s=4.0) == expected
    many = replace(PLAN, work=replace(WORK, groups_per_step=8))
    assert figures_of(*sync_run(), many)["strict_ratio"] is None


def test_operations_are_those_of_the_matrices_and_of_causal_attention() -> None:
    work: Workload = replace(WORK, shape="tiny")
    # Per block: q, k, v, o of 64 x 64, gate, up, down of 64 x 128; two blocks; vocabulary 128.
    blocks, head = 2 * (4 * 64 * 64 + 3 * 64 * 128), 128 * 64
    found = step_flops(work, num_tokens=1000, num_loss_tokens=800, attention_tokens=50)
    assert found == 6 * (blocks * 1000 + head * 800 + 2 * 64 * 50 * 1000)


def test_utilisation_is_of_the_learner_while_it_computes() -> None:
    found = figures_of(*sync_run(), replace(PLAN, peak_tflops=1e-3, case=replace(SYNC, num_ranks=2)))
    assert found["mfu"] == pytest.approx(found["model_tflop"] / 4 / 2 / 1e-3)
    assert figures_of(*sync_run(), PLAN)["mfu"] is None
    own = replace(PLAN, peak_tflops=1e-3, case=replace(SYNC, overrides=("model.path=/models/own",)))
    assert figures_of(*sync_run(), own)["mfu"] is None, "its shape is not the workload's"


def test_the_start_up_adds_up_to_the_first_step() -> None:
    records, spans = sync_run()
    output = ["starting Ray ...", "starting Ray ... 4.5 s", "loading ... failed after 2.0 s",
              "starting engines and learners ... 20.0 s", "step 1/6  reward 1", "stopping ... 9.0 s"]  # fmt: skip
    found = start_up(records, spans, output, started_at=-30.0)
    assert found == {
        "to_first_prompt_s": 30.0,
        "to_first_step_s": 36.0,
        "phase: starting Ray": 4.5,
        "phase: starting engines and learners": 20.0,
        "checks and imports": 5.5,
        "first rollout": 6.0,
    }
    assert start_up([], [], output, started_at=0.0) == {}


def test_the_timeline_begins_behind_the_warm_up() -> None:
    found = timeline_of(*sync_run(), PLAN)
    assert found["seconds"] == 40
    assert found["learner"] == [[6, 10], [16, 20], [26, 30], [36, 40]]
    assert found["running"][:4] == [[0, 1], [1, 1], [4, 0], [10, 1]]
    assert len(found["paused"]) == len(found["syncs"]) == 4
    assert timeline_of(*run_that_empties(), replace(PLAN, case=ASYNC_2)) == found
    assert timeline_of(*run_that_empties(), replace(PLAN, case=ASYNC_2, num_steps=1))["seconds"] == 10
    assert timeline_of(*sync_run(2), PLAN) == {}


# Run directories and results

W1 = workload("w1", is_tiny=True)
ENDED = RunOutcome(
    command=("python",),
    started_at=-30.0,
    wall_s=99.0,
    timeout_s=200.0,
    exit_code=0,
    timed_out=False,
    output=("starting Ray ... 4.5 s",),
)


def run(problem: str = "") -> dict[str, Any]:
    figures = figures_of(*sync_run(), PLAN)
    return {"problem": problem, "figures": figures, "start_up": {"to_first_step_s": 36.0},
            "timeline": timeline_of(*sync_run(), PLAN)}  # fmt: skip


@pytest.mark.parametrize("content", ['{"workload": {"name": "another"}, "runs": {}}', "[]", "{"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.json"
    path.write_text(content)
    with pytest.raises(WorkloadMismatch, match="choose another file"):
        load_results(path, W1)
    assert path.read_text() == content


def test_results_of_several_calls_come_together_in_a_table(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "deep" / "out.json"
    failed = {"problem": "exit code 1: no memory", "figures": None, "start_up": {}, "timeline": {}}
    never_full, unequal = run(), run()
    never_full["figures"]["generation_full_s"] = None
    unequal["figures"] |= {"generation_full_s": 1.0, "learning_s": 8.0}
    cases = {"one": run("first"), "never full": never_full, "unequal": unequal, "failed": failed}
    save_results(path, W1, cases)
    save_results(path, W1, {**load_results(path, W1), "one": run()})  # of a later call
    assert main(["--out", str(path), "--tiny", "--show"]) == EXIT_DONE
    header, one, *others, last = capsys.readouterr().out.splitlines()
    strict = header.index("strict")
    assert "10.00 (10.00-10.00)" in one and "2.50" in one.split()
    assert [line[strict:].split()[0] for line in (one, *others)] == ["2.50", "-", "1.25"]
    assert last == "FAILED failed: exit code 1: no memory"
    with pytest.raises(ValueError, match="no run has figures"):
        plot({"failed": failed}, tmp_path / "out.png")
    if can_plot():
        plot(load_results(path, W1), tmp_path / "out.png")
        assert (tmp_path / "out.png").read_bytes()[1:4] == b"PNG"


PUBLISHED = sorted((ROOT / "docs" / "data").glob("bench_*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_results_that_were_published_before_steps_were_kept_are_still_shown(path: Path, tmp_path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    lines = table(content["runs"]).splitlines()
    assert [line.partition("  ")[0] for line in lines[1 : 1 + len(content["runs"])]] == list(content["runs"])
    name = content["workload"]["name"].partition(" ")[0]
    work = workload(name, is_tiny=False, shape=content["workload"]["shape"])
    with pytest.raises(WorkloadMismatch):
        load_results(path, work)  # nothing measured with other lengths is added to them
    results = load_results(path, work, is_shown_only=True)
    assert results == content["runs"]
    if can_plot():
        plot(results, tmp_path / "out.png")


def write_run(run_dir: Path, num_steps: int) -> None:
    records, spans = sync_run(num_steps)
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
        assert found["figures"] == figures_of(*sync_run(), PLAN)
        assert found["start_up"]["phase: starting Ray"] == 4.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "fast:2+2"], "MODE:SPLIT"),
        (["--case", "async:2+2", "--steps", "0"], "must be above 0"),
        (["--case", "async:2+2", "--set", "async:trainer.total_steps=9"], "give --steps N"),
        (["--case", "async:2+2", "--set", "async:mode.max_staleness=two"], "number >= 0"),
        (["--case", "async:2+2", "--set", "sync:a=1"], "reaches no case"),
        (["--only", "nothing"], "no such case"),
        (["--warmup", "0"], "must be above 0"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    tmp_path: Path, arguments: list[str], message: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out.json"), "--tiny", *arguments])
    assert ended.value.code == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(can_plot(), reason="matplotlib is installed")
def test_a_plot_without_matplotlib_is_refused_before_anything_runs(tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")])
    assert ended.value.code == EXIT_USAGE
    assert "pip install matplotlib" in capsys.readouterr().err
