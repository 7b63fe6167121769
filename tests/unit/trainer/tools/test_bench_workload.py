"""Cases and workloads of the benchmark."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.prompts.datasets import DatasetSpec
from rollout.prompts.prompt_source import load_prompts
from trainer.config.plain import to_run_config
from trainer.learner.weights import check_weights
from trainer.tools.bench_workload import (
    LENGTH_COLUMN,
    NUM_PROMPTS,
    WORKLOADS,
    Case,
    InvalidCase,
    Workload,
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


def case(text: str, tp: int = 1) -> Case:
    return parse_case(text, tensor_parallel_size=tp)


@pytest.mark.parametrize(
    ("text", "tp", "name", "sizes"),
    [
        ("async:2+2", 1, "async 2+2", (2, 2, 4)),
        ("sync:1+3", 1, "sync 1+3", (1, 3, 4)),
        ("sync:4+4", 2, "sync 4+4", (4, 2, 8)),
        ("colocated:4", 1, "colocated 4", (4, 4, 4)),
        ("colocated:4", 2, "colocated 4", (4, 2, 4)),
        ("fast=async:3+1", 1, "fast", (3, 1, 4)),
    ],
)
def test_a_case_is_a_mode_and_a_division_of_the_devices(
    text: str, tp: int, name: str, sizes: tuple[int, int, int]
) -> None:
    found = case(text, tp)
    assert (found.name, (found.num_ranks, found.num_replicas, found.num_devices)) == (name, sizes)


@pytest.mark.parametrize(
    "text", ["async", "async:4", "async:2+0", "colocated:2+2", "fast:2+2", "sync:2+two", "=sync:1+1"]
)
def test_a_case_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidCase, match="case"):
        case(text)


def test_engines_must_go_up_into_their_devices() -> None:
    with pytest.raises(InvalidCase, match="3 engine devices"):
        case("async:1+3", 2)


def test_a_setting_reaches_its_mode_its_name_or_all() -> None:
    cases = with_overrides(
        [case("async:2+2"), case("x=async:3+1"), case("sync:2+2")],
        ["async:a=1", "x:mode.max_staleness=4", "all:b=2", "sync 2+2:c=3"],
    )
    assert [c.overrides for c in cases] == [("a=1", "b=2"), ("a=1", "mode.max_staleness=4", "b=2"), ("b=2", "c=3")]
    assert [c.max_staleness for c in cases] == [1, 4, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [(["colocated:a=1"], "reaches no case"), (["a=1"], "WHICH:KEY=VALUE"), (["sync:a"], "WHICH:KEY=VALUE")],
)
def test_a_setting_that_does_nothing_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(InvalidCase, match=message):
        with_overrides([case("sync:2+2")], settings)


def test_two_cases_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidCase, match="two cases are called sync 2"):
        with_overrides([case("sync:2+2"), case("sync:2+2")], [])


def test_a_staleness_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidCase, match="number >= 0, got 'two'"):
        with_overrides([case("async:2+2")], ["async:mode.max_staleness=two"])


def test_a_staleness_is_found_in_every_way_to_write_it() -> None:
    (found,) = with_overrides([case("async:2+2")], ["all:mode.max_staleness=3", "async:++mode.max_staleness=2"])
    assert found.max_staleness == 2


@pytest.mark.parametrize("key", ["trainer.total_steps", "++trainer.total_steps"])
def test_the_number_of_steps_is_not_for_a_setting_to_say(key: str) -> None:
    with pytest.raises(InvalidCase, match="give --steps N"):
        with_overrides([case("async:2+2")], [f"async:{key}=20"])


@pytest.mark.parametrize(
    ("text", "settings", "seats"),
    [
        ("sync:2+2", [], 256),
        ("sync:1+3", [], 256),
        ("colocated:1", [], 256),
        ("colocated:4", [], 256),
        ("async:2+2", [], 512),
        ("async:2+2", ["async:mode.max_staleness=0"], 256),
        ("async:3+1", ["all:mode.max_staleness=8"], 512),
    ],
)
def test_every_engine_has_seats_for_all_answers_that_can_be_under_way(
    text: str, settings: list[str], seats: int
) -> None:
    (found,) = with_overrides([case(text)], settings)
    assert f"rollout.max_num_seqs={seats}" in overrides_of(found, W1, num_steps=8, device="cpu")


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("async:mode=sync", "--case MODE:SPLIT"),
        ("all:learner.num_ranks=4", "--case MODE:SPLIT"),
        ("all:++rollout.tensor_parallel_size=2", "--tp"),
        ("all:trainer.groups_per_step=8", "is the workload's"),
        ("all:rollout.group_size=2", "is the workload's"),
        ("all:device=cpu", "--device"),
    ],
)
def test_what_the_figures_are_reckoned_by_is_not_for_a_setting_to_say(setting: str, instead: str) -> None:
    with pytest.raises(InvalidCase, match=instead):
        with_overrides([case("async:2+2")], [setting])


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ([], ["model.random_weights=true"]),
        (["all:model.path=/models/own"], []),
        (["all:++model.path=/models/own", "all:model.random_weights=true"], ["model.random_weights=true"]),
        (["all:model.compute_dtype=float32"], ["model.random_weights=true"]),
    ],
)
def test_weights_are_drawn_only_for_the_model_of_the_workload(settings: list[str], drawn: list[str]) -> None:
    (found,) = with_overrides([case("async:2+2")], settings)
    overrides = overrides_of(found, W1, num_steps=8, device="cpu")
    assert [text for text in overrides if text.startswith("model.random_weights")] == drawn


def test_overrides_of_a_case_come_last() -> None:
    (found,) = with_overrides([case("async:2+2")], ["async:rollout.max_num_seqs=64"])
    assert overrides_of(found, W1, num_steps=8, device="cpu")[-1] == "rollout.max_num_seqs=64"


NUM_DRAWS = 20_000


@pytest.mark.parametrize("name", ["w1", "w1-heavy"])
def test_lengths_follow_the_cut_pareto_distribution(name: str) -> None:
    work = workload(name, is_tiny=False)
    low, high = work.min_response_tokens, work.max_response_tokens
    lengths = np.array(work.lengths(NUM_DRAWS // work.group_size))
    assert lengths.min() >= low
    assert lengths.max() == high
    # P(X > x) = low / x up to the cut: closed forms of mean, median and share at the cut.
    mean, spread = low * (1 + math.log(high / low)), math.sqrt(2 * low * high)
    assert lengths.mean() == pytest.approx(mean, abs=4 * spread / math.sqrt(NUM_DRAWS))
    assert np.median(lengths) == pytest.approx(2 * low, rel=0.03)
    assert (lengths == high).mean() == pytest.approx(low / high, rel=0.2)


def test_the_standard_workload_is_the_one_that_others_were_measured_with() -> None:
    lengths = W1.lengths(NUM_DRAWS // W1.group_size)
    assert np.mean(lengths) == pytest.approx(950, rel=0.04)
    assert np.median(lengths) == pytest.approx(505, rel=0.04)
    assert np.quantile(lengths, 0.9) == pytest.approx(2448, rel=0.08)
    assert np.mean(np.array(lengths) == 4096) == pytest.approx(0.064, abs=0.006)
    trained = W1.groups_per_step * W1.group_size * (W1.prompt_tokens + np.mean(lengths))
    assert trained == pytest.approx(370_000, rel=0.04)


def test_every_answer_has_a_length_of_its_own_which_depends_on_seed_and_number_of_the_prompt_alone() -> None:
    assert W1.lengths(5) == [length for index in range(5) for length in W1.lengths_of(index)]
    assert W1.lengths_of(4) == W1.lengths(5)[-8:] and len(W1.lengths_of(4)) == W1.group_size == 8
    assert np.mean([len(set(W1.lengths_of(index))) for index in range(200)]) > 7
    assert W1.lengths(50) != replace(W1, seed=2).lengths(50)
    assert W1.lengths(NUM_PROMPTS + 3)[-24:] == W1.lengths(3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_tiny_workload_is_the_same_distribution_scaled_down(name: str) -> None:
    full, tiny = workload(name, is_tiny=False), workload(name, is_tiny=True)
    scale = full.min_response_tokens // tiny.min_response_tokens
    assert full.max_response_tokens == scale * tiny.max_response_tokens
    for index in range(200):
        assert [n // scale for n in full.lengths_of(index)][: tiny.group_size] == tiny.lengths_of(index)


def test_unknown_workloads_and_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="w1, w1-heavy, uniform, got 'w2'"):
        workload("w2", is_tiny=True)
    with pytest.raises(ValueError, match=r"qwen2.5-3b.*got 'qwen2.5-3'"):
        workload("w1", is_tiny=False, shape="qwen2.5-3")


def test_another_shape_has_the_same_prompts_and_lengths_and_says_so_in_its_name() -> None:
    other = workload("w1", is_tiny=False, shape="qwen2.5-3b")
    assert other.lengths(50) == W1.lengths(50)
    assert (other.name, other.architecture().hidden) == ("w1 (qwen2.5-3b)", 2048)
    assert replace(other, name=W1.name, shape=W1.shape) == W1


@pytest.mark.parametrize("is_tiny", [True, False])
def test_prompts_have_exactly_the_tokens_and_lengths_they_should(tmp_path: Path, is_tiny: bool) -> None:
    from transformers import AutoTokenizer

    work = workload("w1", is_tiny=is_tiny)
    model, file = write_inputs(work, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token_id is None
    found = load_prompts(source(file, work), tokenizer).prompts
    assert len(found) == NUM_PROMPTS
    assert {len(prompt.token_ids) for prompt in found} == {work.prompt_tokens}
    assert len({prompt.token_ids[:6].tobytes() for prompt in found}) == NUM_PROMPTS, "two share a prefix"
    assert [n for prompt in found for n in prompt.metadata[LENGTH_COLUMN]] == work.lengths(NUM_PROMPTS)
    assert max(token for prompt in found for token in prompt.token_ids) < work.architecture().vocab


def source(file: Path, work: Workload) -> DatasetSpec:
    return DatasetSpec(
        path=str(file), reader="auto", split="train", prompt_column="prompt", answer_column="answer",
        answer_required=False, apply_chat_template=False, system_prompt="", dedup=False,
        max_prompt_tokens=work.prompt_tokens,
        reward_column="",
        reward_column_required=False,
        rewards_with_answer=frozenset(),
        overlong_prompts="error", max_operand=49,
    )  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_end_token_and_no_weights_are_in_the_model_directory(tmp_path: Path, name: str) -> None:
    model, _ = write_inputs(workload(name, is_tiny=True), tmp_path)
    config = json.loads((model / "config.json").read_text())
    assert config["eos_token_id"] is None
    check_weights(model, is_random_init=True)


@pytest.mark.parametrize("is_tiny", [True, False])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_configuration_has_known_keys_only(tmp_path: Path, name: str, is_tiny: bool) -> None:
    work = workload(name, is_tiny=is_tiny)
    content = run_config(work, tmp_path / "model", tmp_path / "prompts.jsonl", device="auto")
    content.pop("defaults")
    cfg, problems = to_run_config(content)
    assert problems == []
    assert cfg.learner.max_tokens_per_micro_batch >= work.prompt_tokens + work.max_response_tokens
    assert (cfg.task.shuffle, cfg.trainer.groups_per_step) == (False, work.groups_per_step)


def test_a_benchmark_on_a_cpu_compiles_nothing(tmp_path: Path) -> None:
    for device, is_compiled in (("auto", True), ("cuda", True), ("cpu", False)):
        content = run_config(W1, tmp_path / "model", tmp_path / "prompts.jsonl", device=device)
        assert content["learner"]["compile"] == is_compiled


def test_attention_tokens_are_the_mean_length_that_a_token_sees() -> None:
    uniform = replace(workload("uniform", is_tiny=False), prompt_tokens=44)
    assert attention_tokens(uniform, 7) == 300
    whole = [512 + length for length in W1.lengths(9)]
    assert attention_tokens(W1, 9) == pytest.approx(sum(n * n for n in whole) / sum(whole))
