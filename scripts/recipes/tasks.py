"""Tasks of reasoning-gym as training and held-out prompts: two JSONL files that have no question in common.

    python scripts/recipes/tasks.py OUT              # two-digit sums; needs pip install -e ".[recipes]"
    python scripts/recipes/tasks.py OUT --tasks mixture

A row has a question, its answer (an integer), the generator's name and a difficulty from 0, for `task.curriculum`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reasoning_gym

HELD_OUT_SEED = 10_000_001


@dataclass(frozen=True, kw_only=True)
class Task:
    """A generator of reasoning-gym and its settings."""

    generator: str
    difficulty: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    rewording: dict[str, str] = field(default_factory=dict)
    """Of questions: short ones are cheaper, and a small model follows them better."""


def sums(*, terms: int, digits: int, difficulty: int) -> Task:
    return Task(
        generator="chain_sum",
        difficulty=difficulty,
        settings={"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits},
        rewording={"State the final answer to the following arithmetic problem: ": "What is ", " =": "?"},
    )


SETS: dict[str, list[Task]] = {
    "sums": [sums(terms=2, digits=2, difficulty=0)],
    "mixture": [
        sums(terms=2, digits=1, difficulty=0),
        Task(generator="gcd", difficulty=1, settings={"min_value": 1, "max_value": 50}),
        sums(terms=2, digits=2, difficulty=2),
        Task(generator="simple_equations", difficulty=3, settings={"max_terms": 2, "min_value": 1, "max_value": 20}),
        sums(terms=3, digits=2, difficulty=4),
    ],
}


def rows(task: Task, *, seed: int, size: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item in reasoning_gym.create_dataset(task.generator, seed=seed, size=size, **task.settings):
        question = item["question"]
        for old, new in task.rewording.items():
            question = question.replace(old, new)
        found.append(
            {"question": question, "answer": item["answer"], "task": task.generator, "difficulty": task.difficulty}
        )
    return found


def write(out: Path, tasks: list[Task], *, seed: int, train_size: int, eval_size: int) -> None:
    """`out/train.jsonl` and `out/eval.jsonl`, each with as many rows of every task."""
    per_task = -(-eval_size // len(tasks))
    held_out: list[dict[str, Any]] = []
    train: list[dict[str, Any]] = []
    for task in tasks:
        unique = {row["question"]: row for row in rows(task, seed=HELD_OUT_SEED, size=2 * per_task)}
        held_out += list(unique.values())[:per_task]
        train += rows(task, seed=seed, size=-(-train_size // len(tasks)))
    known = {row["question"] for row in held_out}
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", [row for row in train if row["question"] not in known]), ("eval", held_out)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"wrote {out / name}.jsonl: {len(part)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", choices=SETS, default="sums")
    parser.add_argument("--seed", type=int, default=1, help="of the training questions; the held-out ones are fixed")
    parser.add_argument("--train-size", type=int, default=5000)
    parser.add_argument("--eval-size", type=int, default=200)
    args = parser.parse_args()
    write(args.out, SETS[args.tasks], seed=args.seed, train_size=args.train_size, eval_size=args.eval_size)


if __name__ == "__main__":
    main()
