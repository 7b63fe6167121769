"""A reward that keeps the contract, and others that do not; each in a separate process, so nothing heavy here."""

from __future__ import annotations

import os
import random
import threading
from typing import Any


def exact(*, prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> dict[str, float]:
    del prompt, metadata
    return {"reward": float(response.strip() == answer), "long": float(len(response) > 100)}


async def exact_async(**item: Any) -> dict[str, float]:
    return exact(**item)


def sign(**item: Any) -> float:
    return -exact(**item)["reward"]


def nan(**item: Any) -> float:
    return exact(**item)["reward"] / float("nan")


def empty(**item: Any) -> float:
    return float(ord(item["response"][0]) > 0)


def parts(**item: Any) -> dict[str, float]:
    value = exact(**item)["reward"]
    return {"reward": value, **({"correct": 1.0} if value else {})}


def drawn(**item: Any) -> float:
    del item
    return random.random()


def metadata(**item: Any) -> float:
    item["metadata"].clear()
    return exact(**item)["reward"]


async def metadata_async(**item: Any) -> float:
    return metadata(**item)


def text(**item: Any) -> str:
    del item
    return "good"


def hangs(**item: Any) -> float:
    """On all but a right response."""
    if item["response"].strip() != item["answer"]:
        threading.Event().wait()
    return 1.0


def exits(**item: Any) -> float:
    del item
    os._exit(0)
