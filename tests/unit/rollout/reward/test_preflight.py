"""A reward function that cannot work is refused before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.errors import DataError
from rollout.reward.pool import check_reward
from rollout.types import Prompt

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = Prompt(prompt_id="train/0", token_ids=np.zeros(1, np.int32), text="1+1=", answer="2")


@pytest.mark.parametrize("name", ["arithmetic", "math"])
def test_builtin_rewards_give_full_marks_to_the_answer_itself(name: str) -> None:
    assert check_reward(name, sample=SAMPLE, timeout_s=30.0).reward == 1.0


@pytest.mark.parametrize(
    ("body", "timeout_s", "message"),
    [
        ("raise ValueError('boom')", 30.0, "raised ValueError: boom"),
        ("while True: pass", 1.5, "longer than 1.5 s"),
        ("return float('nan')", 30.0, "returned nan"),
        ("return 'good'", 30.0, "returned str 'good'"),
        ("import os; os._exit(1)", 30.0, "exit code 1"),
    ],
)
def test_functions_that_cannot_work_are_refused_with_the_cause(
    tmp_path: Path, body: str, timeout_s: float, message: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def reward(*, prompt, response, answer, metadata):\n    {body}\n")
    with pytest.raises(DataError, match=f"(?s)mine.py:reward.*{message}.*trial call with response='2'"):
        check_reward(f"{tmp_path}/mine.py:reward", sample=SAMPLE, timeout_s=timeout_s)


def test_functions_that_do_not_import_are_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    with pytest.raises(DataError, match="No module named 'no_such_module'"):
        check_reward(f"{tmp_path}/mine.py:reward", sample=SAMPLE, timeout_s=5.0)
