"""A run that two machines with known speeds have played: its steps, and its directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from trainer.config.plain import to_run_config
from trainer.telemetry.trace import Tracer
from trainer.tools.run_records import RunFacts, StepLine, TraceFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainer.config.schema import RunConfig

NUM_STEPS = 40
Intervals = list[tuple[float, float]]
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "mode": {"max_staleness": 1},
    "learner": {"num_ranks": 4},
    "rollout": {"num_replicas": 4, "group_size": 4, "max_num_seqs": 32},
    "trainer": {"groups_per_step": 8},
}


def played_config(**sections: Mapping[str, Any]) -> RunConfig:
    """On 4 + 4 devices, with S = 1."""
    cfg, problems = to_run_config({
        name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in {*SECTIONS, *sections}
    })  # fmt: skip
    assert not problems
    return cfg


def facts_of(
    lines: Sequence[StepLine],
    *,
    full_s: float | None = None,
    device: str = "an accelerator",
    **sections: Mapping[str, Any],
) -> RunFacts:
    """`full_s`: what a trace shows of the engines' time for a step at their full rate; None without a trace."""
    trace = None if full_s is None else TraceFacts(evaluation_s=0.0, generation_full_s=full_s)
    return RunFacts(cfg=played_config(**sections), lines=lines, device_name=device, trace=trace)


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
            )
        )  # fmt: skip
        at, idle_since = end, engine_free
    return lines, generations, trainings


def write_run(run_dir: Path, *, generate_s: float = 9.0, learn_s: float = 3.0) -> list[StepLine]:
    """The directory of such a run on 4 + 4 devices: config.yaml, metrics.jsonl whose last line is torn, trace.json."""
    run_dir.mkdir()
    lines, generations, trainings = play(generate_s, learn_s)
    config = {
        "device": {"name": "cuda"}, "learner": {"num_ranks": 4}, "rollout": {"num_replicas": 4},
        "trainer": {"groups_per_step": 8}, "from_another_version": 1,
    }  # fmt: skip
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    with (run_dir / "metrics.jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps(msgspec.to_builtins(line)) + "\n")
        file.write('{"step": 99, "perf/st')
    tracer = Tracer(run_dir / "trace.json")
    for k, ((a, b), (c, d)) in enumerate(zip(generations, trainings, strict=True)):
        for replica in range(4):
            name, tokens = f"group {4 * k + replica}", 10 * (replica + 1)
            tracer.add_span("groups", name, start_s=1e9 + a, end_s=1e9 + b, overlapping=True, tokens=tokens)
        tracer.add_span("learner", f"step {k}", start_s=1e9 + c, end_s=1e9 + d)
    tracer.close()
    return lines
