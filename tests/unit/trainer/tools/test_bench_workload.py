"""Command line -> cases and what their runs get; workload -> model, data set and the responses of its agent."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rollout.agent.runner import check_trajectory, make_loop
from rollout.errors import AgentError
from rollout.prompts.datasets import DatasetSpec
from rollout.prompts.prompt_source import load_prompts
from rollout.types import FinishReason, Prompt, TokenChunk, Trajectory
from trainer.config.plain import to_run_config
from trainer.learner.weights import check_weights
from trainer.tools.bench_workload import (
    LENGTH_COLUMN,
    NUM_PROMPTS,
    WORKLOADS,
    Case,
    InvalidCase,
    attention_tokens,
    overrides_of,
    parse_case,
    run_config,
    with_overrides,
    workload,
    write_inputs,
)

if TYPE_CHECKING:
    from pathlib import Path

W1 = workload("w1", is_tiny=False)
OWN, RANDOM = "model.path=/models/own", "model.random_weights=true"


def cases(texts: str, settings: str = "", *, tp: int = 1) -> list[Case]:
    """Of words."""
    return with_overrides([parse_case(text, tensor_parallel_size=tp) for text in texts.split()], settings.split())


@pytest.mark.parametrize(
    ("text", "tp", "name", "sizes"),
    [
        ("async:2+2", 1, "async 2+2", (2, 2, 4)),
        ("sync:4+4", 2, "sync 4+4", (4, 2, 8)),
        ("colocated:4", 1, "colocated 4", (4, 4, 4)),
        ("colocated:4", 2, "colocated 4", (4, 2, 4)),
        ("fast=async:3+1", 1, "fast", (3, 1, 4)),
    ],
)
def test_a_case_is_a_mode_and_a_division_of_the_devices(text: str, tp: int, name: str, sizes: Any) -> None:
    (found,) = cases(text, tp=tp)
    assert (found.name, (found.num_ranks, found.num_replicas, found.num_devices)) == (name, sizes)


@pytest.mark.parametrize(
    ("texts", "settings", "words"),
    [
        *((text, "", "case") for text in (
            "async", "async:4", "async:2+0", "colocated:2+2", "fast:2+2", "sync:2+x", "=sync:1+1")),
        ("sync:2+2 sync:2+2", "", "two cases are called sync 2"),
        ("sync:2+2", "colocated:a=1", "reaches no case"),
        ("sync:2+2", "a=1", "WHICH:KEY=VALUE"),
        ("sync:2+2", "sync:a", "WHICH:KEY=VALUE"),
        ("async:2+2", "async:mode.max_staleness=two", "number >= 0, got 'two'"),
        ("async:2+2", "async:++trainer.total_steps=20", "give --steps N"),
        ("async:2+2", "async:mode=sync", "--case MODE:SPLIT"),
        ("async:2+2", "all:learner.num_ranks=4", "--case MODE:SPLIT"),
        ("async:2+2", "all:++rollout.tensor_parallel_size=2", "--tp"),
        ("async:2+2", "all:rollout.group_size=2", "is the workload's"),
        ("async:2+2", "all:device=cpu", "--device"),
    ],
)  # fmt: skip
def test_a_case_or_a_setting_that_makes_no_sense_is_refused(texts: str, settings: str, words: str) -> None:
    with pytest.raises(InvalidCase, match=words):
        cases(texts, settings)
    with pytest.raises(InvalidCase, match="3 engine devices"):
        cases("async:1+3", tp=2)


@pytest.mark.parametrize(
    ("text", "settings", "num_seqs", "staleness", "ends"),
    [
        # Every engine may run all responses in flight.
        ("sync:1+3", "", 256, 0, [RANDOM]),
        ("colocated:4", "", 256, 0, [RANDOM]),
        ("async:2+2", "", 512, 1, [RANDOM]),
        ("async:2+2", "async:mode.max_staleness=0", 256, 0, [RANDOM, "mode.max_staleness=0"]),
        ("async:3+1", "all:mode.max_staleness=8", 512, 8, [RANDOM, "mode.max_staleness=8"]),
        # A setting reaches its mode, its name or all; the last one wins, over what the benchmark sets too.
        ("async:1+1", "all:mode.max_staleness=3 async:++mode.max_staleness=2", 512, 2,
         ["mode.max_staleness=3", "++mode.max_staleness=2"]),
        ("x=async:1+1", "sync:a=1 x:b=2 all:c=3", 512, 1, ["b=2", "c=3"]),
        ("async:1+1", "async:rollout.max_num_seqs=64", 512, 1, ["rollout.max_num_seqs=64"]),
        # Weights are random only for the model of the workload.
        ("async:1+1", f"all:{OWN}", 512, 1, ["trainer.total_steps=8", OWN]),
        ("async:1+1", f"all:++{OWN} all:{RANDOM}", 512, 1, ["trainer.total_steps=8", f"++{OWN}", RANDOM]),
    ],
)  # fmt: skip
def test_a_run_gets_what_its_case_and_the_settings_say(
    text: str, settings: str, num_seqs: int, staleness: int, ends: list[str]
) -> None:
    case, _ = cases(f"{text} sync:2+2", settings)
    found = overrides_of(case, W1, num_steps=8, device="cpu")
    assert f"rollout.max_num_seqs={num_seqs}" in found
    assert (case.max_staleness, found[-len(ends) :]) == (staleness, ends)


NUM_DRAWS = 20_000


@pytest.mark.parametrize("name", ["w1", "w1-heavy"])
def test_lengths_follow_the_cut_pareto_distribution(name: str) -> None:
    work = workload(name, is_tiny=False)
    low, high = work.min_response_tokens, work.max_response_tokens
    lengths = np.array(work.lengths(NUM_DRAWS // work.group_size))
    assert (lengths.min() >= low, lengths.max()) == (True, high)
    # P(X > x) = low / x up to the cut: closed forms of mean, median and share at the cut.
    mean, spread = low * (1 + math.log(high / low)), math.sqrt(2 * low * high)
    assert lengths.mean() == pytest.approx(mean, abs=4 * spread / math.sqrt(NUM_DRAWS))
    assert np.median(lengths) == pytest.approx(2 * low, rel=0.03)
    assert (lengths == high).mean() == pytest.approx(low / high, rel=0.2)


def test_a_length_depends_on_the_seed_and_the_number_of_prompt_and_response_alone() -> None:
    assert W1.lengths(5) == [length for index in range(5) for length in W1.lengths_of(index)]
    assert len(W1.lengths_of(4)) == W1.group_size == 8
    assert np.mean([len(set(W1.lengths_of(index))) for index in range(200)]) > 7
    assert W1.lengths(50) != replace(W1, seed=2).lengths(50)
    assert W1.lengths(NUM_PROMPTS + 3)[-24:] == W1.lengths(3)
    other = workload("w1", is_tiny=False, shape="qwen2.5-3b")
    assert other.lengths(50) == W1.lengths(50)
    assert (other.name, other.architecture().hidden) == ("w1 (qwen2.5-3b)", 2048)
    whole = [512 + length for length in W1.lengths(9)]
    assert attention_tokens(W1, 9) == pytest.approx(sum(n * n for n in whole) / sum(whole))
    with pytest.raises(ValueError, match="w1, w1-heavy, uniform, got 'w2'"):
        workload("w2", is_tiny=True)
    with pytest.raises(ValueError, match=r"qwen2.5-3b.*got 'qwen2.5-3'"):
        workload("w1", is_tiny=False, shape="qwen2.5-3")


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_tiny_workload_is_the_same_distribution_scaled_down(name: str) -> None:
    full, tiny = workload(name, is_tiny=False), workload(name, is_tiny=True)
    scale = full.min_response_tokens // tiny.min_response_tokens
    assert full.max_response_tokens == scale * tiny.max_response_tokens
    for index in range(200):
        assert [n // scale for n in full.lengths_of(index)][: tiny.group_size] == tiny.lengths_of(index)


def test_prompts_have_exactly_the_tokens_and_lengths_they_should(tmp_path: Path) -> None:
    work = workload("w1", is_tiny=True)
    model, file = write_inputs(work, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token_id is None
    assert json.loads((model / "config.json").read_text())["eos_token_id"] is None
    check_weights(model, is_random_init=True)
    spec = DatasetSpec(
        path=str(file), reader="auto", split="train", prompt_column="prompt", answer_column="answer",
        answer_required=False, apply_chat_template=False, system_prompt="", dedup=False, reward_column="",
        max_prompt_tokens=work.prompt_tokens, reward_column_required=False, rewards_with_answer=frozenset(),
        overlong_prompts="error", max_operand=49,
    )  # fmt: skip
    found = load_prompts(spec, tokenizer).prompts
    assert len(found) == NUM_PROMPTS
    assert {len(prompt.token_ids) for prompt in found} == {work.prompt_tokens}
    assert len({prompt.token_ids[:6].tobytes() for prompt in found}) == NUM_PROMPTS, "two share a prefix"
    lengths: list[Any] = [prompt.metadata[LENGTH_COLUMN] for prompt in found]
    assert [n for each in lengths for n in each] == work.lengths(NUM_PROMPTS)
    assert max(token for prompt in found for token in prompt.token_ids) < work.architecture().vocab


@pytest.mark.parametrize("is_tiny", [True, False])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_configuration_has_known_keys_only(tmp_path: Path, name: str, is_tiny: bool) -> None:
    work = workload(name, is_tiny=is_tiny)
    content = run_config(work, tmp_path / "model", tmp_path / "prompts.jsonl")
    content.pop("defaults")
    cfg, problems = to_run_config(content)
    assert problems == []
    assert cfg.learner.max_tokens_per_micro_batch >= work.prompt_tokens + work.max_response_tokens
    assert (cfg.task.shuffle, cfg.trainer.groups_per_step) == (False, work.groups_per_step)


# The agent


class Engine:
    """A `Generate` that ends every completion after at most `limit` tokens, for the reason given."""

    def __init__(self, limit: int, reason: FinishReason = "stop", *, token: int = 7) -> None:
        self.limit, self.token = limit, token
        self.reason: FinishReason = reason
        self.asked: list[tuple[int, int]] = []

    async def __call__(self, token_ids: np.ndarray, max_tokens: int, *, stop: object = None) -> TokenChunk:
        self.asked.append((len(token_ids), max_tokens))
        number = min(self.limit, max_tokens)
        return TokenChunk(
            token_ids=np.full(number, self.token, np.int32),
            logprobs=np.zeros(number, np.float32),
            versions=np.zeros(number, np.int32),
            finish_reason="length" if number == max_tokens and self.reason == "stop" else self.reason,
        )


async def play(*engines: Engine, length: object) -> list[Trajectory]:
    """A response of each engine to one prompt."""
    loop = make_loop("trainer.bench.agent.forced_lengths", {})  # as configurations of earlier runs name it
    token_ids = np.array([1, 2], np.int32)
    metadata = {"response_tokens": length}
    asked = Prompt(prompt_id="p", token_ids=token_ids, text="", answer="", metadata=metadata)
    return [check_trajectory(await loop.run(asked, 16, engine), asked, 16) for engine in engines]


async def test_a_response_has_exactly_the_length_that_its_prompt_says() -> None:
    whole, pieces = Engine(100), Engine(4)
    for trajectory in await play(whole, pieces, length=9):
        assert (trajectory.status, trajectory.num_generated_tokens) == ("completed", 9)
    assert (whole.asked, pieces.asked) == ([(2, 9)], [(2, 9), (6, 5), (10, 1)]), "an end token does not end a response"
    each = await play(*(Engine(100) for _ in range(6)), length=[3, 9, 5])
    assert [trajectory.num_generated_tokens for trajectory in each] == [3, 9, 5, 3, 9, 5], "the next attempt the same"
    assert (await play(Engine(4, "abort"), length=9))[0].status == "failed"


async def test_rewards_differ_with_the_tokens_and_stay_within_bounds() -> None:
    found = await play(*(Engine(9, token=token) for token in range(20)), length=9)
    rewards = {float(trajectory.turn_rewards[0]) for trajectory in found}
    assert len(rewards) >= 15
    assert all(0 <= reward <= 1 for reward in rewards)


@pytest.mark.parametrize("length", [0, 17, None, "9", [], [17]])
async def test_a_length_that_cannot_be_is_refused(length: object) -> None:
    with pytest.raises(AgentError, match="must hold 1 to 16 tokens"):
        await play(Engine(4), length=length)
