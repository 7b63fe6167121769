"""Run directory -> advice. Two machines with known speeds have played the runs, so the right diagnosis is known."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from msgspec.structs import replace

from tests.fakes.played_run import NUM_STEPS, facts_of, play, played_config, write_run
from trainer.config.compose import load_config
from trainer.telemetry.session import append, describe
from trainer.tools import run_records
from trainer.tools.advise import SURE_STEPS, diagnose, format_report, main, recommend, splits_of
from trainer.tools.run_records import (
    RENAMED,
    StepLine,
    TooFewSteps,
    read_records,
    read_run,
    read_steps,
    read_trace,
    steady,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainer.tools.advise import Diagnosis, Recommendation

Capture = pytest.CaptureFixture[str]
S_0: Any = {"mode": {"max_staleness": 0}}
CPU: Any = {"device": "cpu"}
ONE_RANK: Any = {"learner": {"num_ranks": 1}}
ONE_EACH: Any = {**ONE_RANK, "rollout": {"num_replicas": 1}}
COLOCATED: Any = {"mode": {"name": "colocated", "max_staleness": 0}}


def judged(lines: Sequence[StepLine], **given: Any) -> tuple[Diagnosis, Recommendation, str]:
    """Diagnosis, advice and the report for people; `given`: see `facts_of`."""
    facts = facts_of(lines, **given)
    found = diagnose(facts)
    advice = recommend(found, facts)
    return found, advice, format_report(found, advice, facts)


def played(
    generate_s: float, learn_s: float, *, staleness: int = 1, sync_s: float = 0.0, **more: Any
) -> list[StepLine]:
    """Steady steps; `more` replaces metrics in each."""
    lines, _, _ = play(generate_s, learn_s, sync_s=sync_s, max_staleness=staleness)
    return [replace(line, **more) for line in steady(lines, max_staleness=staleness)[0]]


def constant(step_s: float, learn_s: float, data_s: float, *, idle_s: float, sync_s: float = 0.0) -> list[StepLine]:
    """As many steps as are enough, all alike."""
    line = StepLine(
        step=0, step_s=step_s, learner_s=learn_s, data_wait_s=data_s, sync_wait_s=sync_s, pack_s=0.0,
        engines_idle_s=idle_s, slot_wait_s=0.0,
    )  # fmt: skip
    return [replace(line, step=step) for step in range(SURE_STEPS)]


def busy_elsewhere(
    generate_s: float, learn_s: float, other_s: float, *, staleness: int = 1, idle_s: float | None = None
) -> list[StepLine]:
    """Of a learner that evaluates and saves for `other_s` in each step. Engines are idle once they are done."""
    learner_s = learn_s + other_s
    step_s = learner_s + generate_s if staleness == 0 else max(learner_s, generate_s)
    return constant(
        step_s, learn_s, step_s - learner_s, idle_s=step_s - generate_s if idle_s is None else idle_s
    )  # fmt: skip


def with_slots(lines: Sequence[StepLine], *slots: tuple[int, int]) -> list[StepLine]:
    """`slots`: (first step, slots that are open from it on)."""
    return [replace(one, num_slots=[number for first, number in slots if first <= one.step][-1]) for one in lines]


def waiting_s_0(num_open: int) -> list[StepLine]:
    """Both sides wait for each other although S = 2; so many of 24 slots are open."""
    return steady(with_slots(play(9.0, 9.0, max_staleness=0)[0], (1, num_open)), max_staleness=2)[0]


def split(ranks: int, replicas: int) -> dict[str, int | str]:
    return {"learner.num_ranks": ranks, "rollout.num_replicas": replicas}


def bound(staleness: int) -> dict[str, int | str]:
    return {"mode.max_staleness": staleness}


def apart(staleness: int, ranks: int, replicas: int) -> dict[str, int | str]:
    return {"mode": "async", **bound(staleness), **split(ranks, replicas)}


def sizes(number: int) -> Any:
    return {"learner": {"num_ranks": number}, "rollout": {"num_replicas": number}, **COLOCATED}


DURING_EVALUATIONS = played(9, 3, data_wait_s=0.0, evaluation_wait_s=6.0)
Keys = dict[str, int | str]
ADVICE: dict[str, tuple[list[StepLine], dict[str, Any], str, Keys, Any, str]] = {
    # fact: (steps, of which run, verdict, keys, seconds of a step that are expected, words of the report)
    "generation is slower and gets devices": (played(9, 3), {}, "generation_bound", split(2, 6), 6, "divide"),
    "learning is slower and gets devices": (played(3, 9), {}, "training_bound", split(6, 2), 6, "divide"),
    "equal sides are left alone": (played(5, 5), {}, "balanced", {}, None, "leave it unchanged"),
    "a lone engine gets a second": (
        played(9, 3), ONE_EACH, "generation_bound", {"rollout.num_replicas": 2}, None, "add replicas"),
    "engines that share a device come together": (
        played(9, 3), {**ONE_RANK, "rollout": {"num_replicas": 2, "engines_per_device": 2}}, "generation_bound",
        {"rollout.num_replicas": 4}, None, "add replicas"),
    "sides that alternate get S = 1": (played(5, 4, staleness=0), S_0, "overlap_limited", bound(1), 5, "S = 0"),
    "shared cores cannot be divided": (played(9, 3), CPU, "generation_bound", {}, None, "cores of this machine"),
    "nor can they overlap": (played(9, 3, staleness=0), {**CPU, **S_0}, "overlap_limited", {}, None, "share the cores"),
    # Weight sync
    "a wait for a slot of weight sync asks for one more": (
        played(4, 3, sync_s=4), {}, "sync_waits", {"weight_sync.num_slots": 3}, 3.4, "57.1%"),
    "a wait for packing asks for larger steps": (
        played(4, 3, sync_s=4, pack_s=4.0), {}, "sync_waits", {"trainer.groups_per_step": 16}, None, "packing"),
    # S = 0: the bound that the longest responses need. The first was measured on H200s: 2 was enough and 1 was not.
    **{f"S = 0, {g} s of generation, {full} s at the full rate": (
        played(g, learn, staleness=0), {**S_0, "full_s": full}, "overlap_limited", bound(s), max(learn, full), "S = 0")
       for g, learn, full, s in ((18.9, 14.9, 7.9, 2), (2.6, 7.5, 2.6, 1), (38.0, 19.4, 8.3, 2), (90.0, 10.0, 5.0, 9),
                                 (9.0, 3.0, 9.0, 1))},
    # S > 0
    "a long tail asks for a larger bound and no engines": (
        played(9, 6), {"full_s": 4.0}, "long_tail", bound(2), 6, "S = 1 limits: the longest responses"),
    "so do engines that are slower than the learner and quicker without tails": (
        played(9, 6), {"full_s": 7.0}, "long_tail", bound(2), 7, "S = 1 limits: the longest responses"),
    "without tails to speak of it is generation": (
        played(9, 6), {"full_s": 8.8}, "generation_bound", split(3, 5), 8, "divide"),
    "the bound covers as much time as today: 2 steps of 30 s are 10 of 6 s": (
        played(9, 6, step_s=30.0, data_wait_s=24.0, engines_idle_s=0.0), {"full_s": 6.0}, "long_tail", bound(9), 6, ""),
    "slots that are closed yet are waited for": (
        with_slots(played(9, 6), (1, 8)), {"full_s": 4.0}, "long_tail", {}, None, "ask later"),
    "also where both sides wait": (
        waiting_s_0(16), {"mode": {"max_staleness": 2}}, "overlap_limited", {}, None, "ask later"),
    "3 steps of 18 s are 6 of 9 s": (
        waiting_s_0(24), {"mode": {"max_staleness": 2}}, "overlap_limited", bound(5), 9, "S = 2 limits"),
    "engines that wait for slots give devices away": (
        played(8, 8), {"full_s": 3.0}, "training_bound", split(6, 2), 6, "wait for slots"),
    "unless they are nearly as slow": (played(8, 8), {"full_s": 7.5}, "balanced", {}, None, ""),
    "or the learner saves most of the time": (played(8, 8, learner_s=3.0), {"full_s": 3.0}, "balanced", {}, None, ""),
    # Evaluations and saves
    "more ranks shorten learning and no saves": (
        busy_elsewhere(12, 9.5, 10), {}, "training_bound", split(5, 3), 9.5 * 4 / 5 + 10, "The rest, 10 s of a"),
    "devices are no remedy for saves": (busy_elsewhere(17, 2, 18), ONE_RANK, "training_bound", {}, None, "saves"),
    "they are for learning": (
        busy_elsewhere(17, 19, 1), ONE_RANK, "training_bound", {"learner.num_ranks": 2}, None, "add learner devices"),
    "saves are no wait for the longest responses": (
        busy_elsewhere(20, 9, 9.8, idle_s=0.0), {"full_s": 4.0}, "generation_bound", split(6, 2), 15.8, ""),
    "a balanced run is asked about its saves": (
        busy_elsewhere(19, 9.5, 10), {}, "balanced", {}, None, "are evaluations and saves needed so often?"),
    "evaluations without a period can only be smaller": (
        DURING_EVALUATIONS, {"trainer": {"eval_every": 0}}, "evaluation_waits", {}, None, "task.eval_size"),
    # Colocated, S = 0: the learner waits while engines generate, and they while it learns
    "two devices each take twice as long at once": (
        constant(12, 6, 6, idle_s=6), COLOCATED, "colocated", {}, None, "about as fast as any division"),
    "moves between learner and engines are saved on separate devices": (
        constant(16, 3, 9, idle_s=7), COLOCATED, "colocated", apart(1, 1, 3), 12, "--dry-run mode=async "),
    # Up to 5 turns of 8 s on half of the engines, and 16 s of learning
    **{f"a response that spans {s + 1} turns is as long as all of them": (
        constant(20, 8, 8, idle_s=12), {"mode": {"name": "colocated", "max_staleness": s}}, "colocated",
        apart(s + 1, 2, 2), 16, "alternate") for s in (0, 4)},
    # W1 with 3B on two and with 7B on four H200s (docs/benchmarks.md); asynchronous, they took 15.51 s and 20.5 s.
    "two H200s are divided as was measured": (
        constant(25.23, 7.93, 15.90, sync_s=0.72, idle_s=10.80), {**sizes(2), "full_s": 4.95}, "colocated",
        apart(2, 1, 1), pytest.approx(15.51, rel=0.05), ""),
    "four H200s are divided as was measured": (
        constant(36.2, 10.2, 23.3, sync_s=1.75, idle_s=20.0), {**sizes(4), "full_s": 6.2}, "colocated",
        apart(3, 2, 2), pytest.approx(20.5, rel=0.05), ""),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "given", "verdict", "keys", "step_s", "words"), ADVICE.values(), ids=ADVICE)
def test_the_one_change_that_is_worth_most_is_advised(
    lines: list[StepLine], given: dict[str, Any], verdict: str, keys: Keys, step_s: Any, words: str
) -> None:
    found, advice, report = judged(lines, **given)
    assert (found.verdict, advice.keys) == (verdict, keys)
    assert advice.step_s == (pytest.approx(step_s) if isinstance(step_s, int | float) else step_s)
    assert words in report and f"Advice: {advice.arguments}" in report


REPORTS: dict[str, tuple[list[StepLine], dict[str, Any], str, list[StepLine], dict[str, Any]]] = {
    # fact: (a run whose report has the words; another that lacks them)
    "a new division is to be checked with a dry run": (
        played(9, 3), {}, "--dry-run learner.num_ranks=2 rollout.num_replicas=6`", played(5, 5), {}),
    "what it costs in communication is unknown": (played(9, 3), {}, "What communication", played(5, 5), {}),
    "a notable rest is no learning": (
        busy_elsewhere(12, 9.5, 10), {}, "learning with that rest", busy_elsewhere(12, 9.5, 0.4), {}),
    "on shared devices it includes switching": (
        busy_elsewhere(9, 9.5, 2, staleness=0), COLOCATED, "switching of devices", busy_elsewhere(12, 9.5, 10), {}),
    "few slots for large engines": (
        played(9, 3), {}, "64 responses can be in flight, the engines take 128",
        played(9, 3), {"rollout": {"max_num_seqs": 16}}),
    "evaluations that are the smaller wait": (
        played(9, 3, data_wait_s=5.0, evaluation_wait_s=1.0, engines_idle_s=0.0), {}, "11% of the time the",
        played(9, 3, evaluation_wait_s=0.1), {}),
    "a device that is unknown": (played(9, 3), {"device": "auto"}, "an accelerator is assumed", played(9, 3), {}),
    "checkpoints that block": (
        played(9, 3, stall_s=1.0), {"checkpoint": {"asynchronous": False}},
        "11% of the time the learner waited for them; set checkpoint.asynchronous=true", played(9, 3, stall_s=1.0), {}),
    "checkpoints that are due before the last is written": (
        played(9, 3, stall_s=1.0), {}, "a larger checkpoint.every_steps", played(9, 3, stall_s=0.1), {}),
    "a slow rank": (
        played(9, 3, time_imbalance=1.2), {}, "1.20 times as long as the mean", played(9, 3, time_imbalance=1.05), {}),
    "a slow optimizer": (
        played(9, 3, optimizer_s=0.6), {"learner": {"optimizer": "muon"}}, "The optimizer takes 20% of the learner's",
        played(9, 3, optimizer_s=0.6), {}),
    "prompts that are computed for every response": (
        played(9, 3, num_tokens=800, num_loss_tokens=400), {"learner": {"share_prefix": False}},
        "of the trained tokens are a prompt once more; learner.share_prefix=auto",
        played(9, 3, num_tokens=800, num_loss_tokens=400), {}),
    "small micro-batches": (
        played(9, 3, num_micro_batches=8), {"learner": {"max_tokens_per_micro_batch": 2048}},
        "8 micro-batches per rank of up to 2048 tokens", played(9, 3, num_micro_batches=8), {}),
    "responses that failed": (played(9, 3, failed_frac=0.5), {}, "50.0% of the responses failed", played(9, 3), {}),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "given", "words", "others", "of_others"), REPORTS.values(), ids=REPORTS)
def test_the_report_names_what_limits_and_what_is_unknown(
    lines: list[StepLine], given: Any, words: str, others: list[StepLine], of_others: Any
) -> None:
    assert words in judged(lines, **given)[2]
    assert words not in judged(others, **of_others)[2]


def test_every_split_uses_all_devices_and_the_fastest_is_first() -> None:
    facts = facts_of([], learner={"num_ranks": 3}, rollout={"num_replicas": 2, "tensor_parallel_size": 2})
    splits = splits_of(facts, 5.0, 4.0, fixed_s=1.0)
    slow = {(r, k): max(5.0 * 3 / r + 1.0, 4.0 * 2 / k) for r, k in ((5, 1), (3, 2), (1, 3))}
    assert {(s.num_ranks, s.num_replicas): s.step_s for s in splits} == pytest.approx(slow)
    assert [s.step_s for s in splits] == sorted(s.step_s for s in splits)
    for keys in ({"fsdp_size": 3}, {"context_parallel_size": 3}):
        of_three = facts_of(
            [], learner={"num_ranks": 3, **keys}, rollout={"num_replicas": 2, "tensor_parallel_size": 2}
        )
        assert [s.num_ranks for s in splits_of(of_three, 5.0, 4.0, fixed_s=1.0)] == [3]
    # Engines that serve evaluations while the learner waits are not counted twice.
    serving = judged(busy_elsewhere(5, 4, 10, staleness=0, idle_s=4.0), **S_0)[0].splits
    assert next(s for s in serving if s.num_ranks == 4).step_s == pytest.approx(5 + 4 + 10)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_a_run_accepts_the_bound_that_it_is_advised(mode: str) -> None:
    cfg = load_config([f"mode={mode}"])
    sections = {name: asdict(cfg)[name] for name in ("mode", "learner", "rollout")}
    lines = played(5, 4, staleness=0) if mode == "sync" else played(9, 6)
    _, advice, _ = judged(lines, **sections, full_s=None if mode == "sync" else 4.0)
    assert advice.keys["mode.max_staleness"] == cfg.mode.max_staleness + 1
    assert load_config([f"mode={mode}", *advice.arguments.split()]).mode.name == "async"
    assert ("mode" in advice.keys) == (mode != "async"), "nothing that it has already"


def test_old_groups_that_hold_the_learner_up_speak_for_a_larger_s() -> None:
    def held_up(generate_s: float, learn_s: float) -> tuple[float, str]:
        lines = [replace(line, oldest_wait_s=2.0 * line.step) for line in played(generate_s, learn_s)]
        found, _, report = judged(lines)
        return found.shares.old_groups_hold_up, report

    share, report = held_up(9, 3)
    assert share == pytest.approx(2 * 36 / (9 * 37)) and "S = 1 limits: 22% of the time" in report
    assert held_up(3, 9)[0] == 0, "nothing waited for them"


# Files


FIRST, LAST = 4, NUM_STEPS
"""Steps that count where no engine is lost."""
AWAY = {"fleet/engines_lost": 1}


class Run:
    """The directory of a run with four engines and a learner that waits for them, and what may be changed in it."""

    def __init__(self, path: Path) -> None:
        self.path, self.metrics = path, path / "metrics.jsonl"
        write_run(path)
        self.evaluates()

    def configure(self, **sections: Any) -> None:
        path = self.path / "config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | sections))

    def evaluates(self, every: int = 0, *, at_start: bool = False, blocking: bool = False) -> None:
        keys = {"eval_every": every, "eval_at_start": at_start, "eval_blocking": blocking}
        self.configure(trainer={**keys, "groups_per_step": 8})

    def starts(self, *, device: str = "cuda", after: int | None = None) -> None:
        append(self.path / "environment.jsonl", describe(device=device, resumed_from_step=after))

    def change(self, steps: Sequence[int], metrics: Mapping[str, float]) -> None:
        self.edit(lambda one: {**one, **metrics} if one["step"] in steps else one)

    def edit(self, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.metrics.write_text("".join(json.dumps(edit(one)) + "\n" for one in read_records(self.metrics)))

    def keep_lines(self, number: int) -> None:
        self.metrics.write_text("".join(self.metrics.read_text().splitlines(keepends=True)[:number]))

    def counted(self) -> list[int]:
        return [line.step for line in read_run(self.path).lines]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def reported(run: Run, capsys: Capture) -> tuple[Any, str]:
    """Values for programs and the text for people."""
    assert main([str(run.path), "--json"]) == main([str(run.path)]) == 0
    out = capsys.readouterr().out
    values, end = json.JSONDecoder().raw_decode(out)
    return values, out[end:]


def test_what_is_no_run_is_refused_with_its_reason(run: Run, tmp_path: Path, capsys: Capture) -> None:
    def refusal(path: Path = run.path) -> str:
        assert main([str(path)]) == 2
        out, err = capsys.readouterr()
        assert not out
        return err

    assert "is not a directory" in refusal(tmp_path / "nowhere")
    assert "config.yaml cannot be read" in refusal(tmp_path)
    whole = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join([*whole[:4], "{}\n", *whole[4:]]))
    assert "line 5" in refusal()
    run.metrics.unlink()
    assert "metrics.jsonl cannot be read" in refusal()


def test_too_few_steps_show_where_their_time_went_and_how_many_more_are_needed(run: Run, capsys: Capture) -> None:
    run.keep_lines(4)
    assert main([str(run.path)]) == 1
    out, err = capsys.readouterr()
    assert "4 steps since the start were recorded" in err and "2 more steps are needed for a diagnosis" in err
    assert out.startswith("So far 4 steps, the first ones included, 9.75 s each.") and "69.2%" in out
    assert main([str(run.path), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["verdict"], values["num_steps"], values["num_steps_missing"]) == (None, 4, 2)
    assert values["shares"]["learner_waits_for_data"] == pytest.approx(27 / 39)
    run.keep_lines(0)
    assert main([str(run.path)]) == 1
    out, err = capsys.readouterr()
    assert "6 more steps are needed" in err and not out


def test_lines_that_are_torn_are_left_out_and_earlier_names_of_metrics_are_read(run: Run, tmp_path: Path) -> None:
    assert read_records(tmp_path / "none.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n{"st')
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    run.change([30], {"engine/migrated_requests": 5, "buffer/oldest_wait_s": 1.0})
    before, earlier = read_run(run.path), {new: old for old, new in RENAMED.items()}
    lines = [{earlier.get(name, name): value for name, value in one.items()} for one in read_records(run.metrics)]
    assert len(RENAMED.keys() & lines[29].keys()) > 5
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert read_run(run.path) == before


# Which steps count


def test_the_last_s_steps_of_a_run_that_has_ended_do_not_count(run: Run) -> None:
    lines = play(9.0, 3.0)[0]
    assert [line.step for line in steady(lines, max_staleness=3, has_ended=True)[0]] == [*range(6, 38)]
    assert steady(lines, max_staleness=0, has_ended=True) == steady(lines, max_staleness=0)
    for summary, last in (
        ('{"exit_reason": "completed", "steps": 40}', 39),
        ('{"exit_reason": "accuracy_reached", "steps": 40}', 40),
        ('{"exit_reason": "completed", "steps": 30}', 40),
        ("{", 40),
    ):
        (run.path / "summary.json").write_text(summary)
        assert run.counted() == [*range(FIRST, last + 1)], summary
    run.keep_lines(5)
    (run.path / "summary.json").write_text('{"exit_reason": "completed", "steps": 5}')
    with pytest.raises(TooFewSteps, match=r"the last 1 empty it; 2 more steps are needed .* give a longer run"):
        run.counted()


def test_the_device_is_that_of_the_latest_start(run: Run) -> None:
    run.configure(device={"name": "auto"})
    assert read_run(run.path).device_name == "auto"
    for device in ("cpu", "cuda"):
        run.starts(device=device)
        assert read_run(run.path).device_name == device


def test_steps_before_a_resume_do_not_count(run: Run) -> None:
    run.starts(after=30)
    assert run.counted() == [*range(34, 41)]
    run.starts(after=38)
    with pytest.raises(TooFewSteps, match=r"2 steps since the start were.*the 38 steps before the last resume"):
        run.counted()


FIRST_PROCESS_S = 100.0 + sum(line.step_s for line in play(9.0, 3.0)[0][:20])


@pytest.mark.parametrize(
    ("resumed", "startup_s"),
    [
        ((None, 20), 60.0),
        ((None, 20, 30), 60.0),
        ((None, 20, 35, 30), 500.0),
        ((None, 20, 40), 60.0),  # all was done already
        ((None, 20), FIRST_PROCESS_S - 0.9),  # it started for as long as the first ran
        ((None, 20), FIRST_PROCESS_S + 0.9),
    ],
)
def test_a_resume_that_ended_before_its_first_step_does_not_count(
    run: Run, resumed: tuple[int | None, ...], startup_s: float
) -> None:
    """The last process that made steps began after step 20."""
    at_s, times = 100.0, {}
    for line in play(9.0, 3.0)[0]:
        at_s = times[line.step] = (startup_s if line.step == 21 else at_s) + line.step_s
    run.edit(lambda one: {**one, "time_s": times[one["step"]]})
    for number, step in enumerate(resumed):
        run.starts(device=f"device {number}", after=step)
    facts = read_run(run.path)
    assert (facts.lines[0].step, facts.device_name) == (24, "device 1")


# Lost engines: an engine that was lost is not an idle one, so steps without it do not show who waits


def test_steps_with_a_lost_engine_do_not_count(run: Run, capsys: Capture) -> None:
    before, text = reported(run, capsys)
    assert "lost engine" not in text
    slow = {"perf/step_s": 120.0, "time/wait_for_batch_s": 117.0, "time/engines_idle_s": 60.0}
    run.change(range(19, 26), slow | AWAY)
    run.change(range(22, LAST + 1), {"buffer/oldest_wait_s": 1000.0})
    values, text = reported(run, capsys)
    assert values["num_lost_steps"] == 7
    assert values["num_steps"] == before["num_steps"] - 7
    for name in ("verdict", "recommendation"):
        assert values[name] == before[name]
    for name in ("step_s", "generation_s", "generation_full_s"):
        assert values[name] == pytest.approx(before[name], rel=0.01), name
    for name, share in before["shares"].items():
        assert values["shares"][name] == pytest.approx(share, abs=0.01), name
    assert "7 steps with a lost engine are left out." in text


def test_only_lost_steps_that_would_have_counted_are_reported(run: Run) -> None:
    run.change([1, 2, 3], AWAY)
    assert read_run(run.path).num_lost_steps == 0, "the first three are left out anyway"
    run.change([4], AWAY)
    assert read_run(run.path).num_lost_steps == 1
    run.change(range(1, LAST + 1), {"buffer/num_slots": 8})
    run.change(range(20, LAST + 1), {"buffer/num_slots": 16})
    run.change([10, 11, 30], AWAY)
    assert run.counted() == [*range(20, 30), *range(31, LAST + 1)]
    assert read_run(run.path).num_lost_steps == 1, "those before the slots were opened are left out anyway"
    run.change([*range(20, 27), *range(29, LAST + 1)], AWAY)
    assert run.counted() == [*range(5, 10), *range(12, 20), 27, 28], "too few since slots"
    assert read_run(run.path).num_lost_steps == LAST - 3 - len(run.counted())
    run.change(range(1, 6), {"fleet/engines_lost": 0})
    run.change(range(6, LAST + 1), AWAY)
    message = "35 of the others had a lost engine; 1 more step is needed .* let the run continue with all its engines"
    with pytest.raises(TooFewSteps, match=message):
        read_run(run.path)


# Evaluations have an engine while training continues


def test_waits_during_evaluations_ask_for_fewer_of_them_and_not_for_engines(run: Run, capsys: Capture) -> None:
    """Learning and generation take 4 s a step, concurrently. Every second step waits 10 s during an evaluation."""
    run.configure(rollout={"num_replicas": 1, "tensor_parallel_size": 4})
    run.evaluates(every=2)
    (run.path / "trace.json").unlink()
    for rest, (wait_s, evaluation_s) in enumerate(((10.0, 10.0), (0.2, 0.0))):
        run.change(range(2 - rest, LAST + 1, 2), {
            "perf/step_s": 4 + wait_s, "learner/step_s": 4.0, "time/wait_for_batch_s": wait_s,
            "time/wait_for_eval_s": evaluation_s, "time/engines_idle_s": 0.1, "time/backpressure_s": 0.0,
        })  # fmt: skip
    found, text = reported(run, capsys)
    assert found["verdict"] == "evaluation_waits"
    assert found["recommendation"]["keys"] == {"trainer.eval_every": 4}
    assert found["recommendation"]["step_s"] == pytest.approx(9.1 - 5 / 2, rel=0.05)
    assert found["shares"]["learner_waits_for_data"] == pytest.approx(0.1 / 9.1, rel=0.1)
    assert found["shares"]["learner_waits_for_evaluation"] == pytest.approx(5 / 9.1, rel=0.05)
    assert found["generation_s"] == pytest.approx(4.0, rel=0.05), "engines that serve an evaluation generate no groups"
    for words in ("and for evaluations", "Advice: trainer.eval_every=4", "task.eval_size", "a second engine"):
        assert words in text
    # An evaluation that has one of four engines causes a quarter of the wait.
    line = read_steps(run.path, num_replicas=4)[-1]
    assert (line.evaluation_wait_s, line.data_wait_s) == (2.5, 7.5)


# The trace


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_idle_time_agrees_with_looking_every_moment(num_replicas: int) -> None:
    spans = [(0.0, 4.0), (2.0, 9.0), (2.0, 5.0), (12.0, 20.0), (19.0, 30.0)]
    slow = sum(max(0, num_replicas - sum(a <= t < b for a, b in spans)) / num_replicas for t in range(30))
    assert run_records.idle_seconds(spans, (0.0, 30.0), num_replicas=num_replicas) == pytest.approx(slow)


def test_the_full_rate_is_that_of_tokens_while_enough_groups_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    facts = facts_of(steady(write_run(run_dir), max_staleness=1)[0])
    text = (run_dir / "trace.json").read_text()
    short = '"tokens":10}'
    assert text.count(short) == 40
    last_groups = [f'"group {number}"' for number in range(4 * 39, 4 * 40)]
    lines = text.splitlines()
    running = "\n".join(line for line in lines if '"ph":"e"' not in line or not any(g in line for g in last_groups))

    def full_s(groups_per_step: int, text: str = text, *, has_ended: bool = False) -> float | None:
        (run_dir / "trace.json").write_text(text)
        cfg = played_config(trainer={"groups_per_step": groups_per_step})
        given = {"cfg": cfg, "lines": facts.lines, "device_name": facts.device_name, "has_ended": has_ended}
        found = read_trace(run_dir, type(facts)(**given))
        assert found is not None
        return found.generation_full_s

    assert full_s(8) == pytest.approx(9.0), "four at once are half of eight"
    assert full_s(2) == pytest.approx(9.0), "two of four are filtered, and have to be generated, too"
    assert full_s(9) is None
    assert full_s(8, text.replace(short, "}")) is None, "of a version that did not count tokens"
    assert full_s(8, text.replace(short, '"tokens":0}')) == pytest.approx(9.0), "an agent may respond without any"
    assert full_s(8, running) == pytest.approx(9.0)
    assert full_s(8, running, has_ended=True) != pytest.approx(9.0, rel=0.01)


def test_torn_events_are_skipped_and_a_track_of_one_process_is_not_that_of_another() -> None:
    """Process 1 was killed within group 1; process 2 has other tracks first."""
    events = [
        '{"name":"thread_name","ph":"M","args":{"name":"groups"},"pid":1,"tid":1},',
        '{"name":"group 0","ph":"b","id":1,"ts":1000000,"pid":1,"tid":1},',
        '{"name":"group 1","ph":"b","id":2,"ts":1000000,"pid":1,"tid":1},',
        '{"name":"group 0","ph":"e","id":1,"ts":3000000,"pid":1,"tid":1},',
        '{"name":"thread_name","ph":"M","args":{"name":"evaluation"},"pid":2,"tid":1},',
        '{"name":"group 1","ph":"e","id":2,"ts":9000000,"pid":2,"tid":1},',
        '{"name":"late","ph":"X","ts":1000000,"dur":1000000,"pid":1,"tid":1},',
        '{"name":"gro',
    ]
    spans = run_records.spans_of(line.encode() for line in ["[", *events])
    found = [(span.track, span.name, span.begin_s, span.end_s) for span in spans]
    assert found == [("groups", "group 0", 1.0, 3.0), ("groups", "late", 1.0, 2.0)]
