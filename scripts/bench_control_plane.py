"""What the driver's event loop costs: processor time and memory per group, against the load and the length of a run.

The real loops, work buffer, worker pool, rollout worker, dispatch, router, batcher and metric sinks run in one process
around scripted replicas, learner and weight sync, in virtual time, so that nothing but work is measured
(tests/simulation/world.py). Every case has a process of its own.

    python -m scripts.bench_control_plane --json FILE [--plot FILE]      from the root of the repository; the plot
                                                                         needs matplotlib
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.collector import rare_collections
from rollout.engine.scripted_replica import Workload
from tests.fakes.virtual_time import run_virtual
from tests.simulation.fleet import Plan
from tests.simulation.world import simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLICAS = 64
GROUP_SIZE = 4
MAX_STALENESS = 4
IN_FLIGHT = 10_000
SPARE = 6
"""Quarters: of the admitted trajectories, some have ended and wait for their step."""
TARGET_MS = 1.0
CASE_TIMEOUT_S = 1_200.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: so many groups, with so many trajectories admitted at a time."""

    num_groups: int
    trajectories_admitted: int
    group_size: int = GROUP_SIZE
    num_replicas: int = REPLICAS
    rare_collections: bool = True
    """As in a run; False is Python's own setting."""

    def plan(self) -> Plan:
        groups_per_step = max(1, self.trajectories_admitted // self.group_size // (MAX_STALENESS + 1))
        return Plan(
            num_steps=max(1, self.num_groups // groups_per_step),
            groups_per_step=groups_per_step,
            max_staleness=MAX_STALENESS,
            group_size=self.group_size,
            num_replicas=self.num_replicas,
            max_response_tokens=256,
            # Long enough beside training that nearly all slots generate; the clock is virtual.
            workload=Workload(tail=3.0, min_tokens=64, token_s=(0.4, 0.6), stream_tokens=64),
            train_s=0.05,
            sync_s=0.1,
        )


def measure(case: Case) -> dict[str, Any]:
    """Runs the case in this process."""
    logging.disable(logging.ERROR)
    plan = case.plan()
    with tempfile.TemporaryDirectory() as folder, simulation(plan, Path(folder) / "run") as run:
        before_bytes, began = _rss_bytes(), time.process_time()
        with rare_collections() if case.rare_collections else contextlib.nullcontext():
            run_virtual(run.run())
        cpu_s = time.process_time() - began
    stats = run.buffer.stats()
    num_groups = stats.finished
    return {
        **asdict(case),
        "groups_per_step": plan.groups_per_step,
        "num_steps": plan.num_steps,
        "groups_generated": num_groups,
        "trajectories_in_flight_mean": case.group_size * sum(run.running) / len(run.running),
        "trajectories_in_flight_max": case.group_size * run.peaks["buffer._running"],
        "cpu_s": cpu_s,
        "cpu_ms_per_group": 1e3 * cpu_s / num_groups,
        "cpu_ms_per_trajectory": 1e3 * cpu_s / num_groups / case.group_size,
        "event_loop_turns_per_group": run.num_turns / num_groups,
        "looks_at_the_buffer_per_step": run.num_choices / plan.num_steps,
        "rss_before_mib": before_bytes / 2**20,
        "rss_max_mib": _rss_bytes() / 2**20,
        "discarded_tokens": stats.discarded_tokens,
    }


def _rss_bytes() -> int:
    """The most this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cases(most_groups: int) -> list[Case]:
    """One length under growing loads; then longer and longer runs, of groups of one, which cost most per answer."""
    small, full = (Case(num_groups=10_000, trajectories_admitted=n * SPARE // 4) for n in (IN_FLIGHT // 10, IN_FLIGHT))
    lengths = [replace(small, group_size=1, num_groups=n) for n in (1_000, 3_000, 10_000, 30_000, 100_000)]
    lengths = [case for case in lengths if case.num_groups <= most_groups]
    loads = [replace(small, trajectories_admitted=n * SPARE // 4) for n in (100, 1_000, 3_000, 10_000, 30_000)]
    return [*loads, replace(full, rare_collections=False), *lengths]


def in_own_process(case: Case) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.bench_control_plane", "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=True)
    return json.loads(done.stdout)


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Cost against the length of the run, and against the load."""
    import matplotlib as mpl  # pyright: ignore[reportMissingImports]

    mpl.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    tuned = [result for result in results if result["rare_collections"]]
    by_length = [r for r in tuned if r["group_size"] != GROUP_SIZE]
    by_load = sorted((r for r in tuned if r["group_size"] == GROUP_SIZE), key=lambda r: r["trajectories_admitted"])
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for axes, rows, x, title in (
        (left, by_length, "groups_generated", "length of the run [groups]"),
        (right, by_load, "trajectories_in_flight_mean", "trajectories in flight, mean"),
    ):
        axes.plot([r[x] for r in rows], [r["cpu_ms_per_trajectory"] for r in rows], "o-", label="measured")
        axes.axhline(TARGET_MS, color="tab:red", linestyle="--", label=f"target {TARGET_MS:g} ms")
        axes.set(xscale="log", ylim=(0, 1.1 * TARGET_MS), xlabel=title, ylabel="CPU per trajectory [ms]")
        if axes is right:
            own = [r for r in results if not r["rare_collections"]]
            axes.plot([r[x] for r in own], [r["cpu_ms_per_trajectory"] for r in own], "x", label="default collector")
        axes.legend(loc="lower left")
    middle.plot([r["groups_generated"] for r in by_length], [r["rss_max_mib"] for r in by_length], "o-")
    middle.set(xscale="log", xlabel="length of the run [groups]", ylabel="largest resident memory [MiB]")
    middle.set_ylim(0, 1.2 * max(r["rss_max_mib"] for r in by_length))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--replot", action="store_true", help="plot what --json holds, without measuring")
    parser.add_argument("--most-groups", type=int, default=100_000, help="leave longer runs out")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measure(Case(**json.loads(args.case)))))
        return
    results: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.replot else []
    for case in [] if args.replot else cases(args.most_groups):
        result = in_own_process(case)
        results.append(result)
        print(
            f"{result['groups_generated']:>7} groups, {result['trajectories_in_flight_mean']:>7.0f} in flight: "
            f"{result['cpu_ms_per_trajectory']:.3f} ms and {result['event_loop_turns_per_group']:.1f} turns per "
            f"trajectory and group, {result['rss_max_mib']:.0f} MiB",
            flush=True,
        )
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.plot is not None:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
