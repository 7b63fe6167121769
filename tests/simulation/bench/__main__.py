"""What the driver costs: processor time and memory per trajectory and group, against the load and the length of a run.

By default the real loops, rollout buffer, fleet, rollout worker, scheduler, batch building and metric sinks run in one
process around scripted replicas, learner and weight sync, in virtual time, so that nothing but work is measured
(tests/simulation/world.py). With `--ray` rollout workers and learner ranks are Ray actors, in real time, and only the
driver is measured (tests/simulation/bench/ray_run.py). Every case has a process of its own.

    python -m tests.simulation.bench --json FILE                    from the root of the repository
    python -m tests.simulation.bench --json FILE --ray              added to what the file has
    python -m tests.simulation.bench --json FILE --replot --plot FILE        needs matplotlib
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
from typing import Any

from rollout.processes import rare_collections
from tests.fakes.scripted_replica import Workload
from tests.fakes.virtual_time import run_virtual
from tests.simulation.bench import ray_run
from tests.simulation.bench.plot import plot
from tests.simulation.bench.ray_run import RayCase
from tests.simulation.fleet import Plan
from tests.simulation.world import simulation
from trainer.telemetry.session import made_now

REPLICAS = 64
GROUP_SIZE = 4
MAX_STALENESS = 4
IN_FLIGHT = 10_000
SPARE = 6
"""Quarters: of the admitted trajectories, some have ended and wait for their step."""
RAY_LOADS = ((300, 1_000), (1_000, 1_500), (3_000, 2_000), (10_000, 5_000))
"""Trajectories in flight, about, and groups of the run. Twice as many are admitted: some have ended and wait for their
step, and at the beginning and the end of a run there are few."""
RAY_SPARE = 2
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
            # Long enough compared with training that nearly all slots generate; the clock is virtual.
            workload=Workload(tail=3.0, min_tokens=64, token_s=(0.4, 0.6), stream_interval=64),
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
        "trajectories_in_flight_max": case.group_size * run.peaks["buffer.running"],
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
    """One length under growing loads; then longer and longer runs, of groups of one, which cost most per response."""
    small, full = (Case(num_groups=10_000, trajectories_admitted=n * SPARE // 4) for n in (IN_FLIGHT // 10, IN_FLIGHT))
    lengths = [replace(small, group_size=1, num_groups=n) for n in (1_000, 3_000, 10_000, 30_000, 100_000)]
    lengths = [case for case in lengths if case.num_groups <= most_groups]
    loads = [replace(small, trajectories_admitted=n * SPARE // 4) for n in (100, 1_000, 3_000, 10_000, 30_000)]
    return [*loads, replace(full, rare_collections=False), *lengths]


def ray_cases(most_groups: int) -> list[RayCase]:
    """Growing loads; then longer runs, also of groups of one; then long responses, and with all files."""
    usual = RayCase(num_groups=1_000, trajectories_admitted=2_000)
    loads = [
        replace(usual, series="load", num_groups=n, trajectories_admitted=RAY_SPARE * load) for load, n in RAY_LOADS
    ]
    lengths = [
        replace(usual, series="length", group_size=size, num_groups=n) for size in (4, 1) for n in (1_000, 10_000)
    ]
    long = replace(
        usual,
        series="long answers",
        num_groups=600,
        trajectories_admitted=3_000,
        group_size=8,
        prompt_tokens=512,
        least_tokens=1_024,
        most_tokens=4_096,
    )
    files = [replace(usual, series="files", files=True)]
    files += [replace(long, series="files", files=True)]
    return [case for case in (*loads, long, *files, *lengths) if case.num_groups <= most_groups]


def in_own_process(case: Case | RayCase) -> dict[str, Any]:
    mode = ["--ray"] if isinstance(case, RayCase) else []
    command = [sys.executable, "-m", "tests.simulation.bench", *mode, "--case", json.dumps(asdict(case))]
    done = subprocess.run(
        command, cwd=ray_run.REPOSITORY, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{case} failed with exit code {done.returncode}: {done.stderr[-2_000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_case(text: str, *, with_ray: bool) -> dict[str, Any]:
    """The case of this process, from its JSON."""
    fields = json.loads(text)
    return ray_run.measure(RayCase(**fields)) if with_ray else measure(Case(**fields))


def describe(result: dict[str, Any]) -> str:
    memory = result["private_max_mib"] if "private_max_mib" in result else result["rss_max_mib"]
    return (
        f"{result['groups_generated']:>7} groups of {result['group_size']}, "
        f"{result['trajectories_in_flight_mean']:>7.0f} in flight: "
        f"{result['cpu_ms_per_trajectory']:.3f} ms per trajectory, {memory:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required="--case" not in sys.argv, help="where all figures are kept")
    parser.add_argument("--ray", action="store_true", help="measure the driver of a run with Ray")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--replot", action="store_true", help="plot what --json holds, without measuring")
    parser.add_argument("--most-groups", type=int, default=100_000, help="leave longer runs out")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(run_case(args.case, with_ray=args.ray)))
        return
    results: dict[str, list[dict[str, Any]]] = {"virtual": [], "ray": []}
    if args.json.exists():
        results |= json.loads(args.json.read_text())
    if not args.replot:
        own = results["ray" if args.ray else "virtual"]
        own.clear()
        for case in ray_cases(args.most_groups) if args.ray else cases(args.most_groups):
            own.append({**made_now(), **in_own_process(case)})
            print(describe(own[-1]), flush=True)
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.plot is not None:
        plot(results["virtual"], results["ray"], args.plot)


if __name__ == "__main__":
    main()
