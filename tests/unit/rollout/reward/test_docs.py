"""The examples of docs/add_a_reward.md are rewards that work."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.reward.call import RewardResult
from rollout.reward.pool import RewardPool, check_reward
from rollout.types import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_ANSWERS = 12
SAMPLE = Prompt(prompt_id="train/0", token_ids=np.zeros(1, np.int32), text="1+1=", answer="2")


def example(number: int) -> str:
    text = (Path(__file__).parents[4] / "docs" / "add_a_reward.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]


def test_the_documented_example_passes_the_check(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(example(0))
    result = check_reward(f"{tmp_path}/my_rewards.py:reward", sample=SAMPLE, timeout_s=10.0)
    assert result == RewardResult(reward=1.0, parts={"is_right": 1.0, "is_short": 1.0})


class Judge(BaseHTTPRequestHandler):
    """Busy at the first request. Then it says yes to every response that ends with the reference answer, once all of
    them are there."""

    everybody = threading.Barrier(NUM_ANSWERS, timeout=20)
    was_asked = threading.Event()

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        fields = dict(line.split(": ", 1) for line in question.splitlines() if ": " in line)
        if not self.was_asked.is_set():
            self.was_asked.set()
            self.send_error(503)
            return
        self.everybody.wait()
        verdict = "Yes." if fields["Response"].endswith(fields["Reference answer"]) else "No."
        body = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.request_queue_size = NUM_ANSWERS
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_the_documented_judge_gets_all_responses_at_once_and_again_when_it_was_busy(
    tmp_path: Path, judge_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_URL", judge_url)
    (tmp_path / "my_judge.py").write_text(example(1))
    answers = [f"that is {number}" for number in range(NUM_ANSWERS)]
    async with RewardPool(f"{tmp_path}/my_judge.py:reward", timeout_s=30.0, num_processes=1) as rewards:
        results = await asyncio.gather(*(rewards.score(SAMPLE, answer) for answer in answers))
    assert [result.reward for result in results] == [float(number == 2) for number in range(NUM_ANSWERS)]
