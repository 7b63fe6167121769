"""Reward for mathematics with a known answer, judged by math-verify: equal as mathematics, not as text.

Imported by reward processes only: sympy takes a second to import, and some expressions take for ever to simplify.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

if TYPE_CHECKING:
    from collections.abc import Mapping

_GSM8K_MARK = "####"
_BOX = "\\boxed"


def score(*, prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    r"""1.0 if the final answer of the response equals `answer`, else 0.0.

    The final answer is the last `\boxed{...}`, else the last formula or number; several boxes also count as one answer
    of several values. `answer` may be bare LaTeX, a number, a boxed expression, or a worked solution that ends with
    GSM8K's `#### 42`.

    math-verify's own limits are signal alarms, which a process that is killed from outside does not need.

    Raises:
        ValueError: `answer` holds nothing that can be compared with.
    """
    del prompt, metadata
    # It warns on every call that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    bare = answer.rpartition(_GSM8K_MARK)[2].strip()
    gold = _parse(bare if _BOX in bare else f"{_BOX}{{{bare}}}")
    if not bare or not gold:
        raise ValueError(f"the answer {answer!r:.80} is not a mathematical expression; check task.answer_column")
    # math-verify reads all boxes as one set, which would punish a response that corrects itself.
    last_box = response[max(response.rfind(_BOX), 0) :]
    return 1.0 if _is_equal(gold, last_box) or (last_box != response and _is_equal(gold, response)) else 0.0


def _is_equal(gold: list[Any], response: str) -> bool:
    candidate = _parse(response)
    return bool(candidate) and verify(gold, candidate, timeout_seconds=None)


def _parse(text: str) -> list[Any]:
    return parse(
        text,
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=None,  # pyright: ignore[reportArgumentType] - None turns it off; the annotation says int
    )
