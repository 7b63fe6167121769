"""A run that two machines with known speeds have played: its steps, and its directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from trainer.telemetry.trace import Tracer
from trainer.tools.run_records import Setup, StepLine

if TYPE_CHECKING:
    from pathlib import Path

SETUP = Setup(
    num_ranks=4,
    num_replicas=4,
    tensor_parallel_size=1,
    max_staleness=1,
    groups_per_step=8,
    group_size=4,
    max_num_seqs=32,
    sync_slots=2,
    device_name="an accelerator",
)
NUM_STEPS = 40
Intervals = list[tuple[float, float]]


def play(
    generate_s: float, learn_s: float, *, sync_s: float = 0.0, max_staleness: int = 1
) -> tuple[list[StepLine], Intervals, Intervals]:
    """Batch k is generated once the weights of step k - 1 - S are live, trained when it is there: (lines, generations,
    trainings). The learner waits `sync_s` after each step."""
    lines: list[StepLine] = []
    generations: Intervals = []
    trainings: Intervals = []
    live: list[float] = []
    at, idle_since, engine_free = 0.0, 0.0, 0.0
    for k in range(NUM_STEPS):
        begin = max(engine_free, live[k - 1 - max_staleness] if k > max_staleness else 0.0)
        engine_free = begin + generate_s
        generations.append((begin, engine_free))
        ready = max(at, engine_free)
        trainings.append((ready, ready + learn_s))
        end = ready + learn_s + sync_s
        live.append(end)
        lines.append(
            StepLine(
                step=k + 1, step_s=end - at, learner_s=learn_s, data_wait_s=ready - at, sync_wait_s=sync_s,
                pack_s=0.1 * sync_s, engines_idle_s=begin - idle_since, slot_wait_s=begin - idle_since,
                oldest_wait_s=0.0,
            )
        )  # fmt: skip
        at, idle_since = end, engine_free
    return lines, generations, trainings


def write_run(
    run_dir: Path, *, generate_s: float = 9.0, learn_s: float = 3.0, with_idle: bool = True
) -> list[StepLine]:
    """The directory of such a run on 4 + 4 devices: config.yaml, metrics.jsonl whose last line is torn, trace.json."""
    run_dir.mkdir()
    lines, generations, trainings = play(generate_s, learn_s)
    config = {
        "device": {"name": "cuda"}, "learner": {"num_ranks": 4}, "rollout": {"num_replicas": 4},
        "from_another_version": 1,
    }  # fmt: skip
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    with (run_dir / "metrics.jsonl").open("w") as file:
        for line in lines:
            record: dict[str, Any] = {
                "step": line.step, "perf/step_s": line.step_s, "learner/step_s": line.learner_s,
                "time/wait_for_batch_s": line.data_wait_s, "time/wait_for_sync_s": line.sync_wait_s,
                "sync/pack_s": line.pack_s, "buffer/oldest_wait_s": line.oldest_wait_s,
            }  # fmt: skip
            if with_idle:
                record |= {"time/engines_idle_s": line.engines_idle_s, "time/backpressure_s": line.slot_wait_s}
            file.write(json.dumps(record) + "\n")
        file.write('{"step": 99, "perf/st')
    tracer = Tracer(run_dir / "trace.json")
    for k, ((a, b), (c, d)) in enumerate(zip(generations, trainings, strict=True)):
        for replica in range(4):
            name, tokens = f"group {4 * k + replica}", 10 * (replica + 1)
            tracer.add_span("groups", name, start_s=1e9 + a, end_s=1e9 + b, overlapping=True, tokens=tokens)
        tracer.add_span("learner", f"step {k}", start_s=1e9 + c, end_s=1e9 + d)
    tracer.close()
    return lines
