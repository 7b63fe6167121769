"""A short ReMax run in two turns that trains adapters, from the command line to the exported model: greedy baselines,
an agent loop, its rewards on the way, and adapters that alone move. Real Ray, vLLM, FSDP2 and weight sync."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open

from tests.fakes.metric_names import check_complete, check_known
from tests.fakes.trainer_process import TrainerProcess
from trainer.builtin.tiny_model import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(900)

STEPS, GROUPS, SAMPLES, RANK = 4, 8, 2, 8


@pytest.fixture(scope="module")
def job(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcess]:
    folder = tmp_path_factory.mktemp("adapters")
    example = re.search(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "agents.md").read_text(), re.S)
    assert example is not None
    (folder / "my_agents.py").write_text(example[1])
    build_tokenizer().save_pretrained(folder / "tokenizer")
    process = TrainerProcess(
        folder / "run",
        "algorithm=remax",
        "mode.max_staleness=0",
        "task.agent=my_agents.second_chance",
        f"task.agent_args={{tokenizer: {folder / 'tokenizer'}}}",
        "task.reward.name=zero",
        "rollout.max_response_tokens=24",
        f"model.lora.rank={RANK}",
        "model.lora.alpha=16",
        "learner.lr=3e-3",
        "learner.num_ranks=2",
        "learner.fsdp_size=1",  # both have all weights,
        "learner.context_parallel_size=2",  # and compute every micro-batch together
        f"trainer.total_steps={STEPS}",
        f"trainer.groups_per_step={GROUPS}",
        f"rollout.group_size={SAMPLES}",
        "trainer.eval_every=0",
        "trainer.eval_at_start=false",
        "task.eval_size=16",
        cache=tiny_cache,
        directory=folder,
    )
    with closing(process):
        assert process.wait() == 0, process.text[-4000:]
        yield process


def test_every_step_reports_its_baselines_and_the_rewards_of_its_turns(job: TrainerProcess) -> None:
    assert "remax (an extra greedy response per group)" in job.text
    assert "learner: 2 ranks: 2 replicas of 1 shard(s), 2 ranks per micro-batch" in job.text
    assert [line["step"] for line in job.lines] == list(range(1, STEPS + 1))
    for line in job.lines:
        check_known(line)
        check_complete(line)
        assert None not in line.values()
        assert line["learner/num_samples"] == GROUPS * SAMPLES
        assert "reward/greedy_mean" in line
        assert line["reward/mean"] == line["reward/turns_mean"], "the outcome is worth 0"


def test_every_group_has_its_greedy_answer_and_an_agents_turns(job: TrainerProcess) -> None:
    groups = [
        json.loads(line)
        for path in (job.run_dir / "trajectories").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert all(group["baseline"]["status"] in {"completed", "truncated"} for group in groups)
    assert {len(group["trajectories"]) for group in groups} == {SAMPLES}
    turns = [t["turns"] for group in groups for t in (*group["trajectories"], group["baseline"])]
    assert {len(one) for one in turns} == {1, 2}
    assert {one[0]["reward"] for one in turns} == {1.0, -0.1}


def test_adapters_alone_move_are_trained_and_exported(job: TrainerProcess) -> None:
    export = job.run_dir / "export"
    with safe_open(export / "adapter" / "adapter_model.safetensors", framework="pt") as adapter:
        tensors = [adapter.get_tensor(name) for name in adapter.keys()]  # noqa: SIM118 - it is no dict
    assert (export / "model.safetensors").is_file()
    assert any(t.any() for t in tensors if t.shape[1] == RANK), "B has left zero"
    synced = {line["sync/bytes"] for line in job.lines if "sync/bytes" in line}
    assert synced == {sum(t.numel() * t.element_size() for t in tensors)}, "one engine gets the adapter, nothing else"


def test_the_engine_samples_under_the_adapter_that_the_learner_has(job: TrainerProcess) -> None:
    """On policy, their log-probs of the same tokens agree but for rounding, though every step moves the adapter."""
    assert {line["staleness/max"] for line in job.lines} == {0}
    assert max(abs(line["learner/ratio_max"] - 1) for line in job.lines) < 1e-3
    assert max(line["learner/kl_behavior"] for line in job.lines) < 1e-4
