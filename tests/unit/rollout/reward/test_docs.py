"""The example of docs/add_a_reward.md is a reward that works."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from rollout.reward.preflight import check_reward
from rollout.reward.result import RewardResult
from rollout.types import Prompt


def test_the_documented_example_passes_the_check(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "docs" / "add_a_reward.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    (tmp_path / "my_rewards.py").write_text(example[1])
    sample = Prompt(prompt_id="train/0", token_ids=np.zeros(1, np.int32), text="1+1=", answer="2")
    result = check_reward(f"{tmp_path}/my_rewards.py:reward", sample=sample, timeout_s=10.0)
    assert result == RewardResult(reward=1.0, parts={"is_right": 1.0, "is_short": 1.0})
