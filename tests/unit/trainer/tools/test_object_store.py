"""What is planned for Ray's object store, against the arrays that go there."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.types import Group, Prompt, Trajectory
from tests.fakes.model_7b import config, planned
from tests.fakes.trajectories import make_turn
from trainer.config.schema import RayConfig
from trainer.data.build import build_train_batch
from trainer.tools.dry_run import format_plan
from trainer.tools.memory_plan import GIB
from trainer.tools.run_plan import Workload, object_store

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig
    from trainer.tools.memory_plan import ModelShape
    from trainer.tools.run_plan import ObjectStore

PROMPT, ANSWER = 200, 1000


def group(num_answers: int) -> Group:
    """All answers of the same length, with four characters per token."""
    num_tokens = PROMPT + ANSWER
    # Each with arrays of its own: a pickle writes shared ones once.
    answers = [
        Trajectory.of_turns(
            [make_turn(range(PROMPT), range(PROMPT, num_tokens))], prompt_id="train/0", sample_index=i,
            reward=float(i % 2), reward_parts={},
            status="completed", timings={"generate_s": 1.0}, text=f"{i:04d}" + "x" * (4 * ANSWER - 4),
        )
        for i in range(num_answers)
    ]  # fmt: skip
    prompt = Prompt(prompt_id="train/0", token_ids=np.arange(PROMPT, dtype=np.int32), text="", answer="")
    return Group(group_id=0, prompt_id=prompt.prompt_id, trajectories=answers, start_version=0)


def settings(**sections: dict[str, Any]) -> RunConfig:
    base = {"rollout": {"group_size": 16, "max_response_tokens": ANSWER}, "trainer": {"groups_per_step": 8}}
    return config(**{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def stored(cfg: RunConfig, *, num_slots: int = 24, num_evaluated: int = 0) -> ObjectStore:
    workload = Workload(prompt_tokens=float(PROMPT), num_evaluated=num_evaluated)
    return object_store(cfg, workload, num_slots=num_slots, group_size=cfg.rollout.group_size)


def sizes(store: ObjectStore) -> dict[str, int]:
    return {item.name: item.nbytes for item in store.items}


def test_a_group_has_the_bytes_that_a_worker_sends() -> None:
    store = stored(settings())
    assert store.group_bytes == pytest.approx(len(pickle.dumps(group(16))), rel=0.05)
    assert store.carries_groups
    assert sizes(store)["24 groups in flight"] == 24 * store.group_bytes


def test_groups_of_less_than_what_travels_within_an_answer_go_past_the_store() -> None:
    small = stored(settings(rollout={"group_size": 2}))
    assert len(pickle.dumps(group(2))) < 100_000
    assert not small.carries_groups
    assert list(sizes(small)) == ["micro-batches of one step"]


@pytest.mark.parametrize("algorithm", [{}, {"loss": "clip_cov"}, {"advantage_estimator": "gae"}], ids=str)
def test_micro_batches_have_the_bytes_that_the_ranks_fetch(algorithm: dict[str, Any]) -> None:
    cfg = settings(algorithm=algorithm)
    groups = [group(cfg.rollout.group_size) for _ in range(cfg.trainer.groups_per_step)]
    batch = build_train_batch(
        groups,
        step=0,
        algorithm=cfg.algorithm,
        num_ranks=2,
        max_tokens_per_micro_batch=9 * (PROMPT + ANSWER),
        max_response_tokens=ANSWER,
    )
    real = sum(nbytes(micro) for rank in batch.micro_batches for micro in rank)
    assert sizes(stored(cfg))["micro-batches of one step"] == pytest.approx(real, rel=0.005)


def nbytes(value: object) -> int:
    """Of all arrays in a micro-batch."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(nbytes(getattr(value, each.name)) for each in fields(value)) if is_dataclass(value) else 0


def test_every_sequence_of_a_trajectory_may_be_as_long_as_an_answer() -> None:
    one, three = stored(settings()), stored(settings(task={"agent": "my.agent", "agent_max_sequences": 3}))
    assert three.group_bytes == 3 * one.group_bytes
    assert sizes(three) == {name: 3 * nbytes for name, nbytes in sizes(one).items()}


def test_an_evaluation_counts_with_all_its_answers() -> None:
    store = stored(settings(), num_evaluated=400)
    assert sizes(store)["400 answers of an evaluation"] == 400 * store.group_bytes // 16


def test_the_store_is_compared_with_that_of_a_private_cluster_alone(shape_7b: ModelShape) -> None:
    mark = "(may not fit: it spills to disk)"
    tight = settings(rollout={"max_response_tokens": 20480}, trainer={"groups_per_step": 32})
    text = format_plan(planned(tight, shape_7b), tight)
    assert mark in text and "of 0.25 GiB" in text
    roomy = replace(tight, ray=RayConfig(object_store_gib=4.0))
    assert mark not in format_plan(planned(roomy, shape_7b), roomy)
    joined = replace(tight, ray=RayConfig(address="auto"))
    store = planned(joined, shape_7b).store
    assert store.total_bytes is None and not store.may_spill
    assert mark not in format_plan(planned(joined, shape_7b), joined)


def test_ray_spills_before_the_store_is_full() -> None:
    needed = sum(sizes(stored(settings())).values())
    assert stored(settings(ray={"object_store_gib": 1.2 * needed / GIB})).may_spill
    assert not stored(settings(ray={"object_store_gib": 1.3 * needed / GIB})).may_spill


def test_a_plan_counts_greedy_baselines(shape_7b: ModelShape) -> None:
    plain, greedy = (
        planned(settings(algorithm={"advantage_estimator": name}), shape_7b).store for name in ("grpo", "remax")
    )
    assert greedy.group_bytes * 16 == plain.group_bytes * 17
    assert sizes(greedy)["micro-batches of one step"] == sizes(plain)["micro-batches of one step"]


def test_the_report_says_that_small_groups_go_past_it(shape_7b: ModelShape) -> None:
    cfg = settings(rollout={"group_size": 2})
    text = format_plan(planned(cfg, shape_7b), cfg)
    assert "Groups go past it, as up to 100 kB do" in text and "groups in flight  " not in text
