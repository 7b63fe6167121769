"""The benchmark's parts: cases, processes, shapes, figures. `tests/full` runs the whole of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fakes.bench_hosts import MoodyHost
from tests.fakes.forks import PARTIES, forks
from tests.fakes.row_shards import row_shards
from tests.fakes.virtual_time import run_virtual
from weight_sync.bench.__main__ import main, parser
from weight_sync.bench.case import Case, CaseError, assign_devices, read_cases
from weight_sync.bench.engines import Traffic, engine_devices, merged, windows_of
from weight_sync.bench.hosts import EngineModel, WorkerHost, host_bytes
from weight_sync.bench.report import Results, SyncSample, table
from weight_sync.bench.run import Child
from weight_sync.bench.shapes import MODELS, Architecture
from weight_sync.device.cpu import CpuBackend
from weight_sync.device.select import build
from weight_sync.errors import PullTimeout, WeightSyncError
from weight_sync.messages import PullReport, SyncReport
from weight_sync.plan.planner import build_plan
from weight_sync.receive.recorder import record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def cases(*argv: str) -> list[Case]:
    options = vars(parser().parse_args(argv))
    return read_cases(options.pop("suite", None), options)


def test_cases_and_suites_say_only_what_differs_from_the_line_and_from_the_defaults(tmp_path: Path) -> None:
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps([{"learners": 4}, {"model": "llama3-8b", "colocate": True}]))
    assert cases() == [Case()]
    assert cases("--model", "tiny", "--syncs", "5", "--no-baselines", "--suite", str(suite)) == [
        Case(model="tiny", syncs=5, baselines=False, learners=4),
        Case(model="llama3-8b", syncs=5, baselines=False, colocate=True),
    ]


@pytest.mark.parametrize(
    ("entries", "message"),
    [([{"model": "gpt-9"}], "model must be one of tiny, .* got 'gpt-9'"), ([{"learner": 2}], "learner"),
     ([{"learners": 0}], "learners must be >= 1, got 0"), ([], "must hold a list")],
)  # fmt: skip
def test_a_bad_suite_is_refused_by_name(entries: list[object], message: str, tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text(json.dumps(entries))
    with pytest.raises(CaseError, match=message):
        cases("--suite", str(tmp_path / "suite.json"))


def test_nonsense_on_the_command_line_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "gpt-9"]) == 2
    assert "command line: model must be one of tiny, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "num_devices", "expected"),
    [(Case(learners=2, replicas=2, tp=2), 6, ([0, 1], [[2, 3], [4, 5]])),
     (Case(learners=2, replicas=2, colocate=True), 2, ([0, 1], [[0], [1]])),
     (Case(learners=4, tp=2, colocate=True), 4, ([0, 1, 2, 3], [[0, 1]])),
     (Case(learners=4, replicas=2), 5, r"needs 6 devices, one per process, and 5 are visible; .* or --colocate"),
     (Case(replicas=2, colocate=True), 1, "needs 2 devices")],
    ids=["workers follow learners", "colocated", "colocated, fewer workers", "too few", "too few, colocated"],
)  # fmt: skip
def test_processes_get_devices_or_are_refused_with_their_number(case: Case, num_devices: int, expected: Any) -> None:
    if not isinstance(expected, str):
        assert assign_devices(case, num_devices) == expected
        return
    with pytest.raises(CaseError, match=expected):
        assign_devices(case, num_devices)


HIP, CUDA = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("device", "environ", "expected"),
    [("cuda", {}, ({CUDA: "1,2"}, (0, 1))), ("cuda", {CUDA: "4,5,7"}, ({CUDA: "5,7"}, (0, 1))),
     ("rocm", {}, ({}, (1, 2))), ("rocm", {HIP: "4,5,7"}, ({}, (1, 2))), ("cpu", {}, ({}, ()))],
)  # fmt: skip
def test_an_engine_is_shown_its_places_in_what_this_process_sees(
    device: str, environ: dict[str, str], expected: tuple[dict[str, str], tuple[int, ...]]
) -> None:
    assert engine_devices(build(device), [1, 2], num_devices=3, environ=environ) == expected


@pytest.mark.timing
async def test_errors_keep_their_type_late_answers_are_dropped_and_a_killed_child_is_an_error_immediately() -> None:
    forks(*PARTIES)  # the first process of these tests starts the server that all others are forked from
    child, unborn = (Child(name, MoodyHost, name) for name in ("moody", "unborn"))
    try:
        with pytest.raises(WeightSyncError, match="ValueError: unborn: this one cannot be built"):
            await unborn.ask("start", timeout_s=60.0)
        await child.ask("start", timeout_s=60.0)
        with pytest.raises(PullTimeout, match="moody: no bytes came"):
            await child.ask("fail", timeout_s=30.0)
        with pytest.raises(TimeoutError, match="moody did not answer dawdle in time"):
            await child.ask("dawdle", 0.6, timeout_s=0.1)
        assert (await child.ask("echo", 1, timeout_s=30.0)).value == ("moody", 1)
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"moody died \(exit code -9\) during die"):
            await child.ask("die", timeout_s=30.0)
        assert time.monotonic() - started < 20.0
    finally:
        for each in (child, unborn):
            each.end()
        for each in (child, unborn):
            each.join()
    assert not unborn.process.is_alive()


def test_a_host_has_the_variables_of_its_device_before_it_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(CpuBackend, "set_device", lambda *_: pytest.fail(f"asked with {os.environ}"))
    with pytest.raises(pytest.fail.Exception, match="'OMP_NUM_THREADS': '1'"):
        WorkerHost(Case(model="tiny", device="cpu"), 0, 0)


def test_memory_grows_with_what_is_taken_and_not_when_a_slot_is_written_for_the_first_time() -> None:
    before = host_bytes()
    block = CpuBackend().alloc_persistent(96 << 20)
    taken = host_bytes()
    block.tensor.fill_(1)
    kept = torch.ones(96 << 20, dtype=torch.uint8)
    found = [taken - before, host_bytes() - taken - kept.numel()]
    block.close()
    assert [round(size / (16 << 20)) for size in found] == [6, 0]


PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}  # fmt: skip


def test_every_model_has_its_published_number_of_parameters() -> None:
    assert {name: arch.num_params for name, arch in MODELS.items() if name != "tiny"} == PUBLISHED


@pytest.mark.parametrize("name", ["tiny", "qwen2.5-0.5b", "llama3-8b", "qwen3-8b"])
def test_names_and_shapes_are_those_that_transformers_builds_from_the_same_configuration(name: str) -> None:
    """Not for experts: transformers fuses them in memory and takes them apart in a checkpoint."""
    values = MODELS[name].config("bfloat16")
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert {key: tuple(value.shape) for key, value in model.named_parameters()} == dict(MODELS[name].shapes())


SMALL: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 8, "head_dim": 4, "intermediate": 48}
ARCHITECTURES = (
    Architecture(name="dense", model_type="qwen2", kv_heads=2, vocab=100, has_qkv_bias=True, **SMALL),
    Architecture(name="tied", model_type="qwen3", kv_heads=8, vocab=128, has_qk_norm=True, is_tied=True, **SMALL),
    Architecture(name="experts", model_type="qwen3_moe", kv_heads=4, vocab=64, num_experts=4, expert_intermediate=24,
                 experts_per_token=2, **SMALL),
)  # fmt: skip


def engine(arch: Architecture, worker: int, tp: int) -> EngineModel:
    return EngineModel(arch, worker=worker, num_workers=tp, device=torch.device("cpu"))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.name)
def test_the_loaders_of_all_workers_take_every_element_and_fill_theirs_once(arch: Architecture, tp: int) -> None:
    params = arch.params("bfloat16")
    layouts = [record(engine(arch, worker, tp), params, worker=worker).layout for worker in range(tp)]
    (pack,) = build_plan(epoch=1, params=params, shards=row_shards(params, 1), workers=layouts).pack
    assert sum(item.nbytes for item in pack.items) == 2 * arch.num_params


def test_a_number_of_workers_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="dense cannot be split over 3 workers: it has 8 heads, 2 KV heads"):
        engine(ARCHITECTURES[0], 0, 3)


# Figures


def zeros(kind: type[Any], **values: Any) -> Any:
    """A report of which only some numbers matter."""
    fields = [field.name for field in msgspec.structs.fields(kind) if field.required]
    return kind(**{**{name: {} if name in ("counters", "replicas") else 0 for name in fields}, **values})


def sample(pull_s: float, *, skipped: int = 0) -> SyncSample:
    return SyncSample(
        published=100.5,
        publish_s=0.5,
        total_s=0.7 + pull_s,
        report=zeros(SyncReport, pull_s=pull_s, replicas_skipped=skipped),
        pulls={"r0/0": zeros(PullReport, pull_s=pull_s, attest_s=0.01)},
        commits={"r0": (100.9, 101.0)},
    )


def results(**changes: Any) -> Results:
    counters = {"allocations": 3, "sockets": 2}
    memory = [{"learner 0": 1 << 30}, {"learner 0": (1 << 30) + (63 << 20)}]
    good = {
        "transport": "ipc", "worker_bytes": {"r0/0": 2_000_000_000}, "samples": [sample(0.2), sample(0.1), sample(0.4)],
        "counters": [counters, {**counters, "versions_superseded": 7}], "memory": memory, "baselines": {"x": [1.0]},
        "ceiling_s": [0.16, 0.15, 0.18],
    }  # fmt: skip
    return Results(case=Case(model="tiny"), **{**good, **changes})


def test_figures_are_median_and_maximum_and_the_ratio_is_to_the_best_copy() -> None:
    found = results().as_json()
    assert found["problems"] == [], "counters of events and a little memory may grow"
    figures, worker, ceiling = found["figures"], found["workers"]["r0/0"], found["ceiling"]
    assert figures["pull_s"] == {"p50": 0.2, "max": 0.4}
    assert (figures["publish_s"]["max"], figures["total_s"]["max"]) == (0.5, pytest.approx(1.1))
    assert (worker["pull_s_p50"], worker["gb_s_p50"]) == pytest.approx((0.2, 10.0))
    assert (ceiling["s_p50"], ceiling["gb_s_best"], ceiling["ratio"]) == pytest.approx((0.16, 2 / 0.15, 0.75))
    assert math.isinf(results(samples=[sample(0.0)]).as_json()["ceiling"]["ratio"])
    assert windows_of("r0", results().samples[:1]) == {
        "pull": [(100.5, 100.7)], "attest": [(100.7, pytest.approx(100.71))], "until_commit": [(100.5, 100.9)],
        "commit": [(100.9, 101.0)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"failures": ["PullTimeout: r0"]}, "PullTimeout: r0"), ({"mismatches": ["r0/0 differs"]}, "r0/0 differs"),
     ({"counters": [{"allocations": 3}, {"allocations": 4}]}, "allocations grew by 1 after the first sync"),
     ({"memory": [{"r0/0": 0}, {"r0/0": 65 << 20}]}, "memory of r0/0 grew by 65 MiB"),
     ({"samples": [sample(0.1, skipped=1)]}, "left out 1 times"),
     ({"generation": {"requests_lost": 2}}, "2 requests were lost"), ({"inexact": ["x"]}, "x and weight sync left")],
)  # fmt: skip
def test_whatever_went_wrong_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    found = results(**changes)
    assert any(problem in text for text in found.problems())
    assert f"FAILED: {found.problems()[0]}" in table(found.as_json())
    assert found.as_json()["ok"] is False


# Requests


def steady(*, stall: tuple[float, float] = (0.0, 0.0)) -> Traffic:
    """Two requests, a token each every 0.1 s from 0 to 10; none inside `stall`."""
    traffic, before = Traffic(lambda _: pytest.fail("nothing is asked"), max_tokens=1), 0.0
    for now in (tick / 10 for tick in range(1, 101)):
        if not stall[0] < now < stall[1]:
            traffic.arrivals += [(now, before, 1)] * 2
            before = now
    return traffic


def test_rates_count_tokens_inside_their_windows_and_gaps_are_waits_that_touch_a_commit() -> None:
    windows = {
        "undisturbed": [(1.0, 3.0), (5.0, 6.0)], "pull": [(3.5, 4.5)], "attest": [], "until_commit": [(8.0, 9.0)],
        "commit": [(4.3, 4.4), (7.0, 7.05), (20.0, 21.0)],
    }  # fmt: skip
    found = steady(stall=(4.0, 4.8)).summary(windows)
    rates = [found[f"{name}_tokens_s"] for name in ("undisturbed", "pull", "attest", "until_commit")]
    assert rates == pytest.approx([20.0, 10.0, 0.0, 20.0])
    times = [found[name] for name in ("median_step_s", "commit_gap_max_s", "commit_gap_p50_s")]
    assert times == pytest.approx([0.1, 0.8, 0.1])
    other = {**found, "commit_gap_max_s": 0.2, "requests_lost": 3}
    both = merged([found, other])
    added = (both["undisturbed_tokens_s"], both["commit_gap_max_s"], both["requests_lost"])
    assert added == pytest.approx((40.0, 0.8, 3))


def test_requests_stay_in_flight_until_the_end_and_those_that_are_short_raise_or_never_end_are_lost() -> None:
    running, most = 0, 0

    async def generate(number: int) -> AsyncIterator[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            for _ in range(3 if number == 5 else 4):
                await asyncio.sleep(1000.0 if number == 7 else 0.001)
                yield 2
            if number == 6:
                raise RuntimeError("engine is gone")
        finally:
            running -= 1

    traffic = Traffic(generate, max_tokens=8)

    async def play() -> None:
        await traffic.start(3)
        await asyncio.sleep(0.15)
        await traffic.end(5.0)

    run_virtual(play())
    assert (most, running, traffic.num_lost) == (3, 0, 3)
    assert traffic.num_done > 6
