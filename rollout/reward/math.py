"""Reward for mathematics with a known answer, scored by math-verify: equal as mathematics, not as text.

Imported by reward processes only: sympy takes a second to import, and some expressions take forever to evaluate.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from latex2sympy2_extended.antlr_parser import PSParser
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

if TYPE_CHECKING:
    from collections.abc import Mapping

_GSM8K_MARK = "####"
_BOX = "\\boxed"
_TAG = re.compile(r"</?answer>")
_PERIOD_IN_BOX = re.compile(r"(?<=\d)\.(?=\s*})")


def score(*, prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    r"""1.0 if the final answer of the response equals `answer`, else 0.0.

    The final answer is the last `\boxed{...}`, else the last formula or number, in `<answer>` tags or not; several
    boxes also count as one answer of several values. A percentage equals its fraction. `answer` may be bare LaTeX, a
    number, a boxed expression, or a worked solution that ends with GSM8K's `#### 42`.

    Some responses, such as a tower of powers, take forever to evaluate, and math-verify's own limits are signal
    handlers of Python, which do not run within an operation on large integers: see `RewardEntry.cpu_limit_s`.

    Raises:
        ValueError: `answer` holds nothing that can be compared with.
    """
    del prompt, metadata
    # It warns on every call that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _know_percentages()
    bare = answer.rpartition(_GSM8K_MARK)[2].strip()
    gold = _parse(bare if _BOX in bare else f"{_BOX}{{{bare}}}")
    if not bare or not gold:
        raise ValueError(f"the answer {answer!r:.80} is not a mathematical expression; check task.answer_column")
    # math-verify reads all boxes as one set, which would punish a response that corrects itself.
    last_box = response[max(response.rfind(_BOX), 0) :]
    return float(_is_equal(gold, last_box) or (last_box != response and _is_equal(gold, response)))


def _is_equal(gold: list[Any], response: str) -> bool:
    candidate = _parse(response)
    return bool(candidate) and verify(gold, candidate, timeout_seconds=None)


def _parse(text: str) -> list[Any]:
    # Neither a number that touches a tag nor `\boxed{5.}` is one to math-verify, and `7 500` is one number.
    return parse(
        _PERIOD_IN_BOX.sub("", _TAG.sub(" \n", text)),
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=None,  # pyright: ignore[reportArgumentType] - None turns it off; the annotation is int
    )


def _know_percentages() -> None:
    r"""latex2sympy2_extended 1.11 asks for a token that its grammar for antlr 4.9 does not have, so that no `50\%` is
    parsed; to go when that grammar has it."""
    if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
        setattr(PSParser.AtomContext, "FUNC_GAMMA", lambda _: None)  # noqa: B010 - the class does not declare it
