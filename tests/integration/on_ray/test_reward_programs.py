"""Ray kills the children of an actor that it kills, and with them a guard: programs of rewards go all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import ray

from rollout.reward.pool import RewardPool
from rollout.types import Prompt
from tests.fakes.process_life import is_running, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timing

REWARD = """
import subprocess, sys, time

def reward(*, prompt, response, answer, metadata):
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(program, start_new_session=True)
    open(response, "w").write(str(child.pid))
    time.sleep(600)
"""


class Scorer:
    """Has one reward process, and leaves it to others to end it."""

    async def score(self, target: str, pid_file: str) -> None:
        self._rewards = RewardPool(target, timeout_s=600.0, num_processes=1)
        await self._rewards.start()
        await self._rewards.score(
            Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer=""), pid_file
        )


def test_what_a_reward_has_started_ends_with_an_actor_that_is_killed(cluster: None, tmp_path: Path) -> None:
    path, pid_file = tmp_path / "reward.py", tmp_path / "pid"
    path.write_text(REWARD)
    actor_class: Any = ray.remote(max_concurrency=4)(Scorer)
    actor = actor_class.options(num_cpus=0).remote()
    actor.score.remote(f"{path}:reward", str(pid_file))
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), within_s=20.0, what="no program was started")
    ray.kill(actor)
    wait_until(lambda: not is_running(int(pid_file.read_text())), within_s=20.0, what="the program runs on")
