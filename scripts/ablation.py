"""Train the built-in task once per algorithm or per mode and draw the curves: does every one of them learn?

Usage: python scripts/ablation.py OUT.json [--suite algorithms|mismatch|modes] [--only NAME,NAME] [--plot OUT.png]
       python scripts/ablation.py OUT.json --plot OUT.png --plot-only

One run after another, each a separate `python -m trainer`, in about 20 minutes on two CPU cores. A run that fails or
stays below its goal is in the file and makes the exit code 1. Plotting needs matplotlib, which is not a dependency of
Tandem: pip install matplotlib
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.telemetry.session import made_now
from trainer.tools.bench import run_trainer
from trainer.tools.run_records import read_records

GOAL = 0.9
"""Held-out accuracy that a run must reach."""
TIMEOUT_S = 600.0
COMMON = ("device=cpu", "mode.max_staleness=2", "trainer.eval_every=10", "trainer.stop_at_accuracy=0.92")
NOISE = (
    "task.agent=scripts.perturbed_agent.PerturbedLoop",
    "task.agent_args.std=5",
    "task.agent_args.frac=0.1",
    "trainer.total_steps=200",
)
"""The engine misreports the log-probability of every tenth token, by a normal error of 5 nats."""
WEIGHTED = ("algorithm.correction.objective=decoupled", "algorithm.loss=importance_sampling")
"""The ratio as a weight next to the loss, as TIS and MIS were published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One line of the picture."""

    name: str
    overrides: tuple[str, ...]
    goal: float = GOAL
    """Held-out accuracy that it must reach; 0 asks for nothing."""


SUITES = {
    "algorithms": tuple(
        Run(name=name, overrides=(f"algorithm={name}", "correction=tis", *more))
        for name, *more in (
            ("grpo",),
            ("dapo",),
            ("rloo",),
            ("reinforce_pp",),
            ("ppo",),
            ("gspo", "algorithm.correction.level=sequence_mean"),  # the ratio that its loss holds
            ("cispo", "algorithm.correction.clamp.upper=null"),  # its loss bounds the weight itself
        )
    ),
    "mismatch": (
        Run(name="no error", overrides=()),
        Run(name="uncorrected", overrides=NOISE, goal=0.0),
        Run(name="TIS", overrides=(*NOISE, "correction=tis", *WEIGHTED)),
        Run(name="MIS", overrides=(*NOISE, "correction=mis", *WEIGHTED)),
        Run(name="IcePop", overrides=(*NOISE, "correction=icepop", *WEIGHTED)),
    ),
    "modes": (
        # One in-flight policy is enough here: with S=0 nothing is in flight when weights change.
        Run(name="S=0", overrides=("mode=sync", "mode.max_staleness=0")),
        *(
            Run(name=f"S={bound} {policy}", overrides=(f"mode.max_staleness={bound}", f"mode.in_flight={policy}"))
            for bound in (1, 4)
            for policy in ("keep", "recompute", "abort")
        ),
        *(
            Run(name=f"colocated S={bound}", overrides=("mode=colocated", f"mode.max_staleness={bound}"))
            for bound in (0, 1)
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "out", type=Path, help="JSON file with the curves; written after every run, which keeps what it has of others"
    )
    parser.add_argument("--suite", choices=sorted(SUITES), default="algorithms")
    parser.add_argument("--only", default="", help="names of runs, separated by commas (default: all)")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG")
    parser.add_argument("--plot-only", action="store_true", help="train nothing, draw what is in the file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for every run, after its own")
    args = parser.parse_intermixed_args()
    if args.plot_only and args.plot is None:
        parser.error("--plot-only needs --plot OUT.png")
    runs = {run.name: run for run in SUITES[args.suite]}
    chosen = [] if args.plot_only else [name for name in args.only.split(",") if name] or list(runs)
    if unknown := [name for name in chosen if name not in runs]:
        parser.error(f"--only: suite {args.suite} has no run {', '.join(unknown)}; there are {', '.join(runs)}")
    found: dict[str, Any] = {"suite": args.suite, "goal": GOAL, "runs": []}
    suite, results = args.suite, dict[str, dict[str, Any]]()
    if args.out.exists() or args.plot_only:
        try:
            found = json.loads(args.out.read_text())
            suite, results = found["suite"], {result["name"]: result for result in found["runs"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{args.out} holds no results ({error!r}); give another file")
        if chosen and suite != args.suite:
            parser.error(f"{args.out} holds results of the suite {suite}; give another file for {args.suite}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        result = results[name] = train_one(runs[name], args.overrides)
        # In the order of the suite, without a run that the suite no longer has.
        found |= {"goal": GOAL, "runs": [results[name] for name in runs if name in results]}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        sys.stdout.write(f"{name}: best {result['best']:.3f} in {result['seconds']:.0f} s\n")
        sys.stdout.flush()
    for run in found["runs"]:
        sys.stdout.write(
            f"{run['name']:<14} best accuracy {run['best']:.3f} after {run['num_steps']} steps, {run['seconds']:.0f} s"
            f"{'' if run['ok'] else '   FAILED: ' + run['problem']}\n"
        )
    if args.plot is not None:
        plot(found, args.plot)
    return 0 if all(run["ok"] for run in found["runs"] if args.plot_only or run["name"] in chosen) else 1


def train_one(run: Run, overrides: list[str]) -> dict[str, Any]:
    """Train, and read the curve from the run directory."""
    chosen = [*COMMON, *run.overrides, *overrides]
    with tempfile.TemporaryDirectory(prefix="ablation-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        outcome = run_trainer([*chosen, f"run_dir={folder / 'run'}"], output=folder / "output.txt", timeout_s=TIMEOUT_S)
        curve = read_curve(folder / "run")
    best = max((point["accuracy"] for point in curve["points"]), default=0.0)
    problem = outcome.problem
    if not problem and best < run.goal:
        problem = f"best accuracy {best:.3f} is below {run.goal}"
    objective = next((line.partition("objective: ")[2] for line in outcome.output if "objective: " in line), "")
    return {
        **made_now(), "name": run.name, "overrides": chosen, "objective": objective,
        "seconds": outcome.wall_s, "best": best, "ok": not problem, "problem": problem, **curve,
    }  # fmt: skip


def read_curve(run_dir: Path) -> dict[str, Any]:
    """Accuracy by version, and means of what distinguishes causes."""
    lines = read_records(run_dir / "metrics.jsonl")
    points = [
        {"version": one["version"], "accuracy": one["accuracy"]}
        for one in read_records(run_dir / "evaluations.jsonl")
        if one.get("accuracy") is not None  # one that failed has none
    ]
    wanted = ("mismatch/", "learner/correction")
    names = sorted({name for line in lines for name in line if name.startswith(wanted)})
    means = {name: sum(v) / len(v) for name in names if (v := [line[name] for line in lines if name in line])}
    rewards = [[line["step"], line["reward/mean"]] for line in lines if "reward/mean" in line]
    return {"num_steps": lines[-1]["step"] if lines else 0, "points": points, "rewards": rewards, "means": means}


def plot(found: dict[str, Any], out: Path) -> None:
    """Held-out accuracy against steps, a line per run."""
    import matplotlib as mpl  # pyright: ignore[reportMissingImports]

    mpl.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in found["runs"]:
        points = run["points"]
        axes.plot([p["version"] for p in points], [p["accuracy"] for p in points], "o-", ms=3, label=run["name"])
    axes.axhline(found["goal"], color="gray", lw=0.8, ls=":")
    axes.set(xlabel="optimizer step", ylabel="held-out accuracy (greedy)", ylim=(0, 1))
    axes.legend(loc="lower right", ncols=2)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
