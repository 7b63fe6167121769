"""Tasks of reasoning-gym as training and held-out prompts: two JSONL files that have no question in common.

    python scripts/recipes/tasks.py OUT              # two-digit sums; needs pip install -e ".[recipes]"
    python scripts/recipes/tasks.py OUT --tasks mixture

A row has a question (as `messages`, too), its answer (an integer), the generator's name and a difficulty from 0, for
`task.curriculum`. Tasks that need a warm-up have a third file, `demonstrations.jsonl`: conversations about questions
that are in neither of the others, for scripts/recipes/warm_up.py.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reasoning_gym

if TYPE_CHECKING:
    from collections.abc import Callable

HELD_OUT_SEED, DEMONSTRATION_SEED = 10_000_001, 20_000_002
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A generator of reasoning-gym and its settings."""

    generator: str
    difficulty: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    rewording: dict[str, str] = field(default_factory=dict)
    """Of questions: short ones are cheaper, and a small model follows them better."""
    system: str = ""
    """The first message of a conversation."""
    solution: Callable[[dict[str, Any]], list[Message]] | None = None
    """What follows the question in a demonstration, from an item of the generator."""


def sums(*, terms: int, digits: int, difficulty: int) -> Task:
    return Task(
        generator="chain_sum",
        difficulty=difficulty,
        settings={"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits},
        rewording={"State the final answer to the following arithmetic problem: ": "What is ", " =": "?"},
    )


def written_solution(item: dict[str, Any]) -> list[Message]:
    """The steps that the generator knows, and its answer as the last number."""
    steps = item["metadata"]["answer_cot"].partition("####")[0].strip()
    return [{"role": "assistant", "content": f"{steps}\nThe answer is {item['answer']}."}]


def call_and_answer(item: dict[str, Any]) -> list[Message]:
    """A call of rewards.py:calculator as rollout.rendering reads it, its result, and the answer."""
    call = {"name": "calculator", "arguments": {"expression": item["metadata"]["expression"]}}
    return [
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": item["answer"]},
        {"role": "assistant", "content": f"The answer is {item['answer']}."},
    ]


PRODUCTS = Task(
    generator="products",
    settings={"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3},
    rewording={"Solve the following multiplication: ": "What is ", ". Give only the result as your final answer.": "?"},
    system=(
        "You may ask the tool calculator for a product. Write "
        '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call> '
        "and read its result, then state the answer."
    ),
    solution=call_and_answer,
)
SETS: dict[str, list[Task]] = {
    "arithmetic": [sums(terms=2, digits=2, difficulty=0)],
    "word_problems": [
        Task(
            generator="gsm_symbolic",
            rewording={" Give the result as your final answer. Do not include units.": ""},
            solution=written_solution,
        )
    ],
    "calculator": [PRODUCTS],
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
        if not item["answer"].lstrip("-").isdecimal():
            continue  # the reward compares integers
        question = item["question"]
        for old, new in task.rewording.items():
            question = question.replace(old, new)
        messages = [{"role": "system", "content": task.system}] if task.system else []
        messages.append({"role": "user", "content": question})
        solved = [] if task.solution is None else task.solution(item)
        found.append(
            {
                "question": question,
                "messages": messages,
                "answer": item["answer"],
                "task": task.generator,
                "difficulty": task.difficulty,
                "demonstration": [*messages, *solved],
            }
        )
    return found


def write(out: Path, tasks: list[Task], *, seed: int, train_size: int, eval_size: int, num_shown: int = 0) -> None:
    """`out/train.jsonl` and `out/eval.jsonl`, each with as many rows of every task, and demonstrations if there are."""
    per_task = -(-eval_size // len(tasks))
    held_out: list[dict[str, Any]] = []
    train: list[dict[str, Any]] = []
    for task in tasks:
        unique = {row["question"]: row for row in rows(task, seed=HELD_OUT_SEED, size=2 * per_task)}
        held_out += list(unique.values())[:per_task]
        train += rows(task, seed=seed, size=-(-train_size // len(tasks)))
    known = {row["question"] for row in held_out}
    train = [row for row in train if row["question"] not in known]
    known |= {row["question"] for row in train}
    shown = [
        {"messages": row["demonstration"]}
        for task in tasks
        if task.solution is not None
        for row in rows(task, seed=DEMONSTRATION_SEED, size=num_shown)
        if row["question"] not in known
    ]
    out.mkdir(parents=True, exist_ok=True)
    for row in (*train, *held_out):
        del row["demonstration"]
    for name, part in (("demonstrations", shown), ("train", train), ("eval", held_out)):
        if part:
            (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
            print(f"wrote {out / name}.jsonl: {len(part)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", choices=SETS, default="arithmetic")
    parser.add_argument("--seed", type=int, default=1, help="of the training questions; the held-out ones are fixed")
    parser.add_argument("--train-size", type=int, default=5000)
    parser.add_argument("--eval-size", type=int, default=200)
    parser.add_argument("--num-shown", type=int, default=1000, help="demonstrations, where the task has some")
    args = parser.parse_args()
    sizes = {"train_size": args.train_size, "eval_size": args.eval_size, "num_shown": args.num_shown}
    write(args.out, SETS[args.tasks], seed=args.seed, **sizes)


if __name__ == "__main__":
    main()
