"""Train the variants of a question with several seeds each, and draw what they learned: one picture, one table.

    python scripts/recipes/compare.py objectives               # GRPO, DAPO and PPO with a critic, seeds 0, 1 and 2
    python scripts/recipes/compare.py lora --seeds 0 --out runs/lora trainer.total_steps=40
    python scripts/recipes/compare.py objectives --draw        # again, from the runs that are there

Runs go to OUT/VARIANT/seed_N, one after another, by scripts/recipes/run.sh; those that have ended there are not started
again. OUT/curves.png has the mean over seeds and the band from the lowest to the highest, OUT/table.md the figures.
The picture needs matplotlib: pip install -e ".[plot]"
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainer.tools.run_records import read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GOAL = 0.3
"""A mean reward, over `WINDOW` steps, until which the table gives the seconds."""
WINDOW = 5
Record = dict[str, Any]
Curve = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Question:
    recipe: str
    variants: dict[str, tuple[str, ...]]
    """Name -> what it changes."""


PLAIN = ("task.curriculum=none", "task.difficulty_column=")
QUESTIONS = {
    "arithmetic": Question(recipe="smollm2_arithmetic", variants={"GRPO": ()}),
    "mixture": Question(
        recipe="smollm2_mixture",
        variants={
            "easy to hard": (),
            "shuffled": PLAIN,
            "pass rates": (*PLAIN, "task.pass_rate_min=0.05", "task.pass_rate_max=0.95"),
        },
    ),
    "word_problems": Question(
        recipe="smollm2_word_problems",
        variants={"after a warm-up": (), "without": ("model.path=.cache/recipes/smollm2-135m",)},
    ),
    "calculator": Question(
        recipe="smollm2_calculator",
        variants={"calculator": (), "no tool": ("task.agent=", "~task.agent_args")},
    ),
    "objectives": Question(
        recipe="smollm2_arithmetic",
        variants={"GRPO": (), "DAPO": ("algorithm=dapo",), "PPO, critic": ("algorithm=ppo", "critic.lr=2e-5")},
    ),
    "lora": Question(
        recipe="smollm2_arithmetic",
        variants={"all weights": (), "LoRA, rank 32": ("model.lora.rank=32", "learner.lr=2e-4")},
    ),
    "staleness": Question(
        recipe="smollm2_arithmetic",
        variants={f"S = {number}": (f"mode.max_staleness={number}",) for number in range(3)},
    ),
}


def main(argv: Sequence[str] | None = None, *, launch: Callable[[list[str]], int] = subprocess.call) -> int:
    """The exit code: 0 all have ended and are drawn, 1 some have failed, 2 there is nothing to draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every run")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="default runs/QUESTION")
    parser.add_argument("--draw", action="store_true", help="start no run")
    args = parser.parse_args(argv)
    question: Question = QUESTIONS[args.question]
    out: Path = (Path("runs") / args.question if args.out is None else args.out).absolute()
    places = {name: [out / slug(name) / f"seed_{seed}" for seed in args.seeds] for name in question.variants}
    failed: list[str] = []
    for name, runs in places.items():
        for seed, run in zip(args.seeds, runs, strict=True):
            if args.draw or has_ended(run):
                continue
            command = ["bash", str(Path(__file__).with_name("run.sh")), question.recipe, *question.variants[name]]
            if launch([*command, f"seed={seed}", f"run_dir={run}", *args.overrides]):
                failed.append(str(run))
    found = {name: [read_records(run / "metrics.jsonl") for run in runs] for name, runs in places.items()}
    found = {name: [records for records in runs if records] for name, runs in found.items()}
    if not any(found.values()):
        sys.stderr.write(f"no run in {out} has ended a step\n")
        return 2
    (out / "table.md").write_text(table(found, examples={name: written(runs) for name, runs in places.items()}))
    print((out / "table.md").read_text())
    draw(out / "curves.png", found, title=args.question.replace("_", " "))
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return int(bool(failed))


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())


def has_ended(run: Path) -> bool:
    try:
        return json.loads((run / "summary.json").read_text())["exit_reason"] in ("completed", "accuracy_reached")
    except (OSError, ValueError, KeyError):
        return False


# --- figures ---


def rewards(records: list[Record], *, over: str) -> Curve:
    """Mean reward of the last `WINDOW` steps by `over`, a metric."""
    known = [(record[over], record["reward/mean"]) for record in records if record.get("reward/mean") is not None]
    return [(known[i][0], fmean(y for _, y in known[max(0, i + 1 - WINDOW) : i + 1])) for i in range(len(known))]


def accuracies(records: list[Record]) -> Curve:
    """Held-out accuracy by the version that was evaluated."""
    return [(one["eval/version"], one["eval/accuracy"]) for one in records if one.get("eval/accuracy") is not None]


def band(curves: list[Curve]) -> list[tuple[float, float, float, float]]:
    """(x, lowest, mean, highest) where all curves have a point."""
    by_x = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(one) for one in by_x))) if by_x else []
    columns = [(x, [one[x] for one in by_x]) for x in shared]
    return [(x, min(ys), fmean(ys), max(ys)) for x, ys in columns]


def seconds_to(goal: float, records: list[Record]) -> float:
    """Seconds from the command until the mean reward of `WINDOW` steps reached `goal`; infinite if it never did."""
    curve = rewards(records, over="time_s")[WINDOW - 1 :]
    return next((seconds for seconds, reward in curve if reward >= goal), math.inf)


def table(found: dict[str, list[list[Record]]], *, examples: dict[str, str]) -> str:
    head = ["variant", "seeds", "steps", "mean reward, last steps", "held-out accuracy, first -> last"]
    head += ["seconds to the first step's end", f"to a reward of {GOAL:g}", "in all", "a step, median"]
    lines = [head, ["---"] * len(head)]
    for name, runs in found.items():
        if not runs:
            continue
        scores = [accuracies(records) for records in runs]
        first, last = ([curve[index][1] for curve in scores if curve] for index in (0, -1))
        steps = [sorted(b["time_s"] - a["time_s"] for a, b in pairwise(run[1:])) for run in runs]
        lines.append(
            [
                name,
                str(len(runs)),
                spread([len(records) for records in runs], ".0f"),
                spread([rewards(records, over="step")[-1][1] for records in runs], ".3f"),
                f"{spread(first, '.3f')} -> {spread(last, '.3f')}",
                spread([records[0]["time_s"] for records in runs], ".0f"),
                spread([seconds_to(GOAL, records) for records in runs], ".0f"),
                spread([records[-1]["time_s"] for records in runs], ".0f"),
                spread([one[len(one) // 2] for one in steps if one], ".2f"),
            ]
        )
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([*rows, *(f"\n**{name}**\n{text}" for name, text in examples.items() if text)]) + "\n"


def spread(values: list[float], form: str) -> str:
    """Mean (lowest to highest)."""
    if not values:
        return "-"
    whole = format(fmean(values), form) if all(map(math.isfinite, values)) else "not by all"
    return whole if min(values) == max(values) else f"{whole} ({min(values):{form}} to {max(values):{form}})"


def written(runs: list[Path]) -> str:
    """What the first policy and the last one of a run write to the same held-out question."""
    files = sorted((runs[0] / "evaluations").glob("version_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
    if len(files) < 2:
        return ""
    lines: list[str] = []
    for path in (files[0], files[-1]):
        record = read_records(path)[0]
        question, answer = record["prompt"]["text"], record["trajectories"][0]["text"]
        texts = (json.dumps(text, ensure_ascii=False)[:500] for text in (question, answer))
        lines.append("- {}: {} -> {}".format(path.stem.replace("_", " "), *texts))
    return "\n".join(lines)


# --- picture ---


def draw(path: Path, found: dict[str, list[list[Record]]], *, title: str) -> None:
    """Mean reward by steps and by seconds, and held-out accuracy by steps."""
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        sys.stderr.write(f'{path} is not drawn: pip install -e ".[plot]"\n')
        return
    mpl.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (by_step, by_time, held_out) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for index, (name, runs) in enumerate(found.items()):
        color = f"C{index}"
        for axes, curves in (
            (by_step, [rewards(records, over="step") for records in runs]),
            (held_out, [accuracies(records) for records in runs]),
        ):
            if points := band(curves):
                x, low, mean, high = zip(*points, strict=True)
                axes.plot(x, mean, color=color, label=f"{name} ({len(runs)} seeds)")
                axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        for records in runs:  # seeds do not share their seconds
            by_time.plot(*zip(*rewards(records, over="time_s"), strict=True), color=color, linewidth=0.8)
    by_step.set(xlabel="optimizer step", ylabel=f"mean reward of {WINDOW} steps", title=title)
    by_time.set(xlabel="seconds since the command", title="the same by time, every seed")
    held_out.set(xlabel="optimizer step", ylabel="held-out accuracy (greedy)")
    by_step.legend()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
