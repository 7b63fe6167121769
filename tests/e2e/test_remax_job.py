"""A short ReMax run in two turns, from the command line: greedy baselines, an agent loop and its rewards on the way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.builtin.tokenizer import build_tokenizer
from trainer.telemetry.catalog import check_complete, check_known

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.trainer_process import TrainerProcess

GROUPS, SAMPLES = 8, 2


def test_a_remax_run_with_an_agent_ends_well_and_reports_its_baselines(
    start: Callable[..., TrainerProcess], tmp_path: Path
) -> None:
    example = re.search(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "agents.md").read_text(), re.S)
    assert example is not None
    (tmp_path / "my_agents.py").write_text(example[1])
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    process = start(
        tmp_path / "run",
        "algorithm=remax",
        "task.agent=my_agents.second_chance",
        f"task.agent_args={{tokenizer: {tmp_path / 'tokenizer'}}}",
        "task.reward.name=zero",
        "rollout.max_response_tokens=24",
        "trainer.total_steps=3",
        f"trainer.groups_per_step={GROUPS}",
        f"rollout.group_size={SAMPLES}",
        "trainer.eval_every=0",
        "task.eval_size=16",
        "checkpoint.export_hf=false",
        directory=tmp_path,
    )
    assert process.wait() == 0, process.text[-4000:]
    assert "remax (one more, greedy answer per group)" in process.text
    assert [line["step"] for line in process.lines] == [1, 2, 3]
    for line in process.lines:
        check_known(line)
        check_complete(line)
        assert None not in line.values()
        assert line["learner/num_samples"] == GROUPS * SAMPLES
        assert "reward/greedy_mean" in line
        assert line["reward/mean"] == line["reward/turns_mean"], "the outcome is worth 0"
    groups = [
        json.loads(line)
        for path in (process.run_dir / "trajectories").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert all(group["baseline"]["status"] in {"completed", "truncated"} for group in groups)
    assert {len(group["trajectories"]) for group in groups} == {SAMPLES}
    turns = [t["turns"] for group in groups for t in (*group["trajectories"], group["baseline"])]
    assert {len(one) for one in turns} == {1, 2}
    assert {one[0]["reward"] for one in turns} == {1.0, -0.1}
