"""The examples of docs/agents.md and docs/openai_agents.md are agents that work."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rollout.agent.runner import make_loop, run_episode
from rollout.types import Prompt
from tests.fakes.chat_policy import END, ChatPolicy, by_turn
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


PROGRAM = """
import os, subprocess, sys
from openai import OpenAI
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
with open(os.environ["PIDS"], "w") as pids:
    print(os.getpid(), child.pid, file=pids)
message = {"role": "user", "content": sys.stdin.read()}
print(OpenAI().chat.completions.create(model="policy", messages=[message]).choices[0].message.content)
"""

Make = Callable[[str, ChatPolicy], Any]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    text = (Path(__file__).parents[4] / "docs" / "openai_agents.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "openai_agents_of_the_docs.py").write_text("\n".join(blocks))
    (tmp_path / "my_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))

    def made(name: str, policy: ChatPolicy) -> Any:
        policy.tokenizer.save_pretrained(tmp_path / "tokenizer")
        args = {"solve": f"openai_agents_of_the_docs.{name}", "tokenizer": str(tmp_path / "tokenizer")}
        return make_loop("rollout.agent.openai_agent.openai_agent", args)

    return made


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [(["5"], [1.0]), (["6", "5"], [0.0, 0.5]), (["6", "7"], [0.0, 0.0])],
    ids=["at-once", "second", "never"],
)
async def test_the_documented_function_pays_as_it_says(make: Make, answers: list[str], rewards: list[float]) -> None:
    policy = await ChatPolicy(by_turn(*(answer + END for answer in answers))).start()
    loop = make("solve", policy)
    prompt = replace(policy.prompt(), messages=({"role": "user", "content": "2+3?"},))
    episode = await run_episode(loop, prompt, 200, generate=policy.generate, timeout_s=30.0)
    await loop.close()
    assert [turn.reward for turn in episode.turns()] == rewards


async def test_the_documented_program_is_paid_for_its_answer(make: Make, tmp_path: Path) -> None:
    policy = await ChatPolicy(by_turn(f"5{END}")).start()
    loop = make("solve_in_a_program", policy)
    prompt = replace(policy.prompt(), text="2+3?")
    episode = await run_episode(loop, prompt, 200, generate=policy.generate, timeout_s=60.0)
    await loop.close()
    assert (episode.turns()[-1].reward, episode.status) == (1.0, "completed")
    await nothing_runs(tmp_path)


async def test_the_documented_program_ends_with_the_trajectory(make: Make, tmp_path: Path) -> None:
    policy = await ChatPolicy(by_turn(f"5{END}")).start()
    policy.engine.faults.hang_generation = True
    loop = make("solve_in_a_program", policy)
    playing = asyncio.create_task(run_episode(loop, policy.prompt(), 200, generate=policy.generate, timeout_s=60.0))
    await policy.has_begun.wait()
    assert len(running(tmp_path)) == 2
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await loop.close()
    await nothing_runs(tmp_path)


def running(directory: Path) -> list[int]:
    """Processes of the program that are there and no zombies."""
    pids = map(int, (directory / "pids").read_text().split())
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


async def nothing_runs(directory: Path) -> None:
    """What is killed takes a moment."""
    async with asyncio.timeout(30.0):
        while running(directory):
            await asyncio.sleep(0.01)
