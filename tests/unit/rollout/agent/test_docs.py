"""The example of docs/agents.md is an agent that works."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rollout.agent.runner import make_loop, run_episode
from rollout.types import Prompt
from tests.unit.rollout.agent.test_trajectory import Scripted
from trainer.builtin.tiny_model import build_tokenizer


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [(["19"], [1.0]), (["18", "19"], [-0.1, 0.5]), (["18", "17"], [-0.1, 0.0])],
    ids=["at-once", "second", "never"],
)
async def test_the_documented_environment_pays_as_it_says(
    answers: list[str], rewards: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[4] / "docs" / "agents.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    (tmp_path / "agents_of_the_docs.py").write_text(example[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prompt = Prompt(prompt_id="p", token_ids=np.array(tokenizer.encode("12+7="), np.int32), text="12+7=", answer="19")
    generate = Scripted(*((tokenizer.encode(answer), "stop") for answer in answers))
    loop = make_loop("agents_of_the_docs.second_chance", {"tokenizer": str(tmp_path / "tokenizer")})
    episode = await run_episode(loop, prompt, 40, generate=generate, timeout_s=5.0)
    assert episode.status == "completed"
    assert [turn.reward for turn in episode.turns()] == rewards
