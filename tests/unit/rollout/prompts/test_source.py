"""The order of prompts: seeded, complete in every epoch, and resumable to the exact next prompt."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import DataError
from rollout.prompts.prompt_source import PromptSet, PromptSource, eval_subset, fingerprint
from rollout.types import Prompt


def prompt_set(num_prompts: int, *, answer: str = "x") -> PromptSet:
    prompts = tuple(
        Prompt(prompt_id=f"train/{i}", token_ids=np.array([i], np.int32), text=str(i), answer=answer)
        for i in range(num_prompts)
    )
    return PromptSet(prompts=prompts, num_duplicates=0, num_overlong=0, fingerprint=fingerprint(prompts))


def ids(source: PromptSource, count: int) -> list[str]:
    return [source.next().prompt_id for _ in range(count)]


@given(num_prompts=st.integers(1, 40), seed=st.integers(0, 2**40), num_epochs=st.integers(1, 4))
def test_every_epoch_shows_every_prompt_once(num_prompts: int, seed: int, num_epochs: int) -> None:
    source = PromptSource(prompt_set(num_prompts), seed=seed, shuffle=True)
    everything = sorted(f"train/{i}" for i in range(num_prompts))
    for epoch in range(num_epochs):
        assert source.epoch == epoch
        assert sorted(ids(source, num_prompts)) == everything


@given(num_prompts=st.integers(1, 20), seed=st.integers(0, 9), num_before=st.integers(0, 70), shuffle=st.booleans())
def test_a_resumed_stream_continues_exactly(num_prompts: int, seed: int, num_before: int, shuffle: bool) -> None:
    unbroken = PromptSource(prompt_set(num_prompts), seed=seed, shuffle=shuffle)
    ids(unbroken, num_before)
    saved = json.loads(json.dumps(unbroken.state_dict()))
    resumed = PromptSource(prompt_set(num_prompts), seed=seed, shuffle=shuffle)
    resumed.load_state_dict(saved)
    assert ids(resumed, 50) == ids(unbroken, 50)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    first, again, other = (PromptSource(prompt_set(50), seed=s, shuffle=True) for s in (1, 1, 2))
    epochs = [ids(first, 50) for _ in range(2)]
    assert [ids(again, 50) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    assert ids(other, 50) != epochs[0]


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    source = PromptSource(prompt_set(3), seed=5, shuffle=False)
    assert ids(source, 7) == [f"train/{i}" for i in (0, 1, 2, 0, 1, 2, 0)]


def test_rows_that_name_another_reward_than_before_are_refused_and_older_checkpoints_go_on() -> None:
    def source(*rewards: str) -> PromptSource:
        prompts = tuple(replace(p, reward=r) for p, r in zip(prompt_set(2).prompts, rewards, strict=True))
        digest = fingerprint(prompts)
        assert digest == "349408ac797239a2", "checkpoints know it"
        data = PromptSet(prompts=prompts, num_duplicates=0, num_overlong=0, fingerprint=digest)
        return PromptSource(data, seed=0, shuffle=True)

    state = source("", "math").state_dict()
    source("", "math").load_state_dict(state)
    for others in (("", "arithmetic"), ("math", ""), ("", "")):
        with pytest.raises(DataError, match="rewards was"):
            source(*others).load_state_dict(state)
    del state["rewards"]
    source("", "arithmetic").load_state_dict(state)


@pytest.mark.parametrize(
    ("data", "seed", "shuffle", "message"),
    [
        (prompt_set(5), 0, True, "num_prompts was 4, now 5"),
        (prompt_set(4, answer="y"), 0, True, "fingerprint was"),
        (prompt_set(4), 1, True, "seed was 0, now 1"),
        (prompt_set(4), 0, False, "shuffle was 1, now 0"),
    ],
)
def test_an_order_that_cannot_continue_is_refused(data: PromptSet, seed: int, shuffle: bool, message: str) -> None:
    state = PromptSource(prompt_set(4), seed=0, shuffle=True).state_dict()
    with pytest.raises(DataError, match=f"cannot continue: .*{message}"):
        PromptSource(data, seed=seed, shuffle=shuffle).load_state_dict(state)


def test_a_damaged_state_is_refused() -> None:
    source = PromptSource(prompt_set(4), seed=0, shuffle=True)
    with pytest.raises(DataError, match="lacks epoch"):
        source.load_state_dict({"position": 0})
    with pytest.raises(DataError, match="position 4 is not within its 4 prompts"):
        source.load_state_dict(source.state_dict() | {"position": 4})


def test_prompts_are_found_by_id() -> None:
    source = PromptSource(prompt_set(4), seed=0, shuffle=True)
    assert source.find("train/2").text == "2"
    with pytest.raises(DataError, match="no prompt 'train/9'"):
        source.find("train/9")


def test_prompt_sets_that_cannot_be_streamed_are_refused() -> None:
    two = prompt_set(2)
    with pytest.raises(DataError, match="empty"):
        PromptSource(replace(two, prompts=()), seed=0, shuffle=True)
    with pytest.raises(DataError, match="share one prompt_id"):
        PromptSource(replace(two, prompts=two.prompts[:1] * 2), seed=0, shuffle=True)
    with pytest.raises(DataError, match=">= 0, got -1"):
        PromptSource(two, seed=-1, shuffle=True)


def test_the_evaluation_subset_is_fixed_and_drawn_from_everywhere() -> None:
    data = prompt_set(1000)
    subset = eval_subset(data, size=100)
    assert subset == eval_subset(data, size=100)
    indices = [int(p.text) for p in subset]
    assert indices == sorted(set(indices))
    assert len(indices) == 100
    assert 400 < np.mean(indices) < 600
    assert eval_subset(data, size=0) == eval_subset(data, size=5000) == data.prompts
