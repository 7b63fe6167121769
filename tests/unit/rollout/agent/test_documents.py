"""The examples of docs/agents.md and docs/openai_agents.md are agents that work."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rollout.agent.runner import make_loop, run_episode
from tests.fakes.chat_policy import END, ChatPolicy, by_turn
from tests.fakes.process_life import is_running, wait_until
from tests.unit.rollout.agent.test_trajectory import Scripted
from trainer.builtin.tiny_model import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = """
import os, subprocess, sys
from openai import OpenAI
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
with open(os.environ["PIDS"], "w") as pids:
    print(os.getpid(), child.pid, file=pids)
message = {"role": "user", "content": sys.stdin.read()}
print(OpenAI().chat.completions.create(model="policy", messages=[message]).choices[0].message.content)
"""


def examples(document: str) -> list[str]:
    text = (Path(__file__).parents[4] / "docs" / f"{document}.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(
    ("responses", "rewards"),
    [(["19"], [1.0]), (["18", "19"], [-0.1, 0.5]), (["18", "17"], [-0.1, 0.0])],
    ids=["at-once", "second", "never"],
)
async def test_the_documented_environment_pays_what_the_text_promises(
    responses: list[str], rewards: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "agents_of_the_docs.py").write_text(examples("agents")[0])
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    policy = ChatPolicy(by_turn())
    prompt = replace(policy.prompt(answer="19"), token_ids=policy.prompt().token_ids[:1])
    generate = Scripted(*((tokenizer.encode(response), "stop") for response in responses))
    loop = make_loop("agents_of_the_docs.second_chance", {"tokenizer": str(tmp_path / "tokenizer")})
    episode = await run_episode(loop, prompt, 40, generate=generate, timeout_s=5.0)
    assert episode.status == "completed"
    assert [turn.reward for turn in episode.turns()] == rewards


@pytest.fixture
def openai_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, ChatPolicy], Any]:
    blocks = examples("openai_agents")
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
    ("responses", "rewards"),
    [(["5"], [1.0]), (["6", "5"], [0.0, 0.5]), (["6", "7"], [0.0, 0.0])],
    ids=["at-once", "second", "never"],
)
async def test_the_documented_function_pays_what_the_text_promises(
    openai_loop: Any, responses: list[str], rewards: list[float]
) -> None:
    policy = await ChatPolicy(by_turn(*(response + END for response in responses))).start()
    loop = openai_loop("solve", policy)
    prompt = replace(policy.prompt(), messages=({"role": "user", "content": "2+3?"},))
    episode = await run_episode(loop, prompt, 200, generate=policy.generate, timeout_s=30.0)
    await loop.close()
    assert [turn.reward for turn in episode.turns()] == rewards


@pytest.mark.parametrize("ends", ["by-itself", "cancelled"])
async def test_the_documented_program_is_paid_and_ends_with_its_trajectory(
    openai_loop: Any, tmp_path: Path, ends: str
) -> None:
    policy = await ChatPolicy(by_turn(f"5{END}")).start()
    policy.engine.faults.hang_generation = ends == "cancelled"
    loop, prompt = openai_loop("solve_in_a_program", policy), replace(policy.prompt(), text="2+3?")
    playing = asyncio.create_task(run_episode(loop, prompt, 200, generate=policy.generate, timeout_s=60.0))
    await policy.has_begun.wait()
    processes = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    assert len(processes) == 2
    if ends == "cancelled":
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    else:
        episode = await playing
        assert (episode.turns()[-1].reward, episode.status) == (1.0, "completed")
    await loop.close()
    await asyncio.to_thread(wait_until, lambda: not any(map(is_running, processes)), within_s=30.0, what="one runs on")
