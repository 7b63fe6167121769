"""A short supervised warm-up: a model reads demonstrations before reinforcement learning begins, on one device.

    python scripts/recipes/warm_up.py MODEL DEMONSTRATIONS.jsonl OUT

A row of DEMONSTRATIONS has `messages`; only what the assistant says is learned. OUT is a Hugging Face directory that a
run loads with model.path=OUT; OUT/warm_up.json says what it was trained on. Recipes take the demonstrations that
scripts/recipes/tasks.py made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

IGNORED = -100
"""Label of a token that is not learned."""


def labelled(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and their labels, (T, T): every turn of the assistant with its end token."""

    def rendered(number: int, *, begin: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=begin)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    whole = rendered(len(messages), begin=False)
    labels = [IGNORED] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = rendered(index, begin=True), rendered(index + 1, begin=False)
        if whole[: len(after)] != after or after[: len(before)] != before:
            raise SystemExit(f"the chat template changes earlier turns, so they cannot be labelled: {messages}")
        end = next(i for i in reversed(range(len(after))) if after[i] == tokenizer.eos_token_id) + 1
        labels[len(before) : end] = whole[len(before) : end]
    return whole, labels


def batch_of(rows: list[tuple[list[int], list[int]]], *, pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """int64[B, T], padded on the right."""
    longest = max(len(tokens) for tokens, _ in rows)

    def padded(parts: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([part + [value] * (longest - len(part)) for part in parts], device=device)

    return {
        "input_ids": padded([tokens for tokens, _ in rows], pad),
        "labels": padded([labels for _, labels in rows], IGNORED),
        "attention_mask": padded([[1] * len(tokens) for tokens, _ in rows], 0),
    }


def train(model: Any, rows: list[Any], *, pad: int, device: torch.device, args: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    order, losses = random.Random(args.seed), list[float]()
    batches: list[list[Any]] = []
    for _ in range(args.epochs):
        shuffled = order.sample(rows, len(rows))
        batches += [shuffled[i : i + args.batch_size] for i in range(0, len(shuffled), args.batch_size)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(batches))
    for number, rows_of_step in enumerate(batches, 1):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch_of(rows_of_step, pad=pad, device=device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number % 10 in (0, 1) or number == len(batches):
            print(f"warm-up step {number} of {len(batches)}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("demonstrations", type=Path)
    parser.add_argument("out", type=Path, help="left alone if it was made of the same")
    parser.add_argument("--rows", type=int, help="the first ones only; default all")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    text = args.demonstrations.read_text()
    shown = [json.loads(line)["messages"] for line in text.splitlines()][: args.rows]
    made_of = {
        "model": str(args.model),
        "demonstrations": str(args.demonstrations),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "num_rows": len(shown),
        **{name: getattr(args, name) for name in ("epochs", "batch_size", "lr", "seed")},
    }
    note = args.out / "warm_up.json"
    if note.is_file() and made_of.items() <= json.loads(note.read_text()).items():
        print(f"{args.out} is there already")
        return
    torch.manual_seed(args.seed)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to(device).train()
    rows = [labelled(messages, tokenizer) for messages in shown]
    print(f"{len(rows)} demonstrations of {args.demonstrations}, {args.epochs} epoch(s)")
    losses = train(model, rows, pad=tokenizer.eos_token_id, device=device, args=args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    note.write_text(json.dumps({**made_of, "losses": [losses[0], losses[-1]]}, indent=1) + "\n")  # last: it is whole
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
