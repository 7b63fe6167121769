"""Which corrections a loss goes with, by the ratio that it holds, and what a sampler or a shaped reward rules out."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.algorithm import LOSS_RATIOS, UNBOUNDED_LOSSES, LossName, held_ratio
from trainer.config.compose import load_config
from trainer.config.rules import check_combinations
from trainer.errors import ConfigurationError

PREFIX = "algorithm.correction"
SYNC = {"mode__name": "sync", "mode__max_staleness": 0}
LOSSES = get_args(LossName)
OWN = {"algorithm__loss": "my_package.losses.mine"}


def with_loss(loss: str, **keys: Any) -> list[str]:
    return keys_refused(config_with(algorithm__loss=loss, **keys))


@pytest.mark.parametrize("loss", LOSSES)
def test_decoupled_takes_no_loss_whose_bound_would_never_act(loss: LossName) -> None:
    problems = check_combinations(config_with(algorithm__loss=loss, algorithm__correction__objective="decoupled"))
    if loss in UNBOUNDED_LOSSES:
        assert problems == []
        return
    (problem,) = problems
    assert problem.key == f"{PREFIX}.objective" and f"algorithm.loss={loss}" in problem.allowed
    assert "algorithm.loss=importance_sampling" in problem.do
    if loss not in ("reinforce", "dro"):
        assert "always 1" in problem.allowed and "bypass or loglinear" in problem.do


def test_a_loss_of_the_user_is_free_to_have_no_bound() -> None:
    assert keys_refused(config_with(**OWN, algorithm__correction__objective="decoupled")) == []


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_clamp_in_the_loss_must_be_of_the_ratio_that_the_loss_holds(loss: LossName, level: str) -> None:
    clamped = {"algorithm__correction__clamp__upper": 2.0, "algorithm__correction__level": level}
    held = LOSS_RATIOS[loss]
    wrong = f"{PREFIX}.clamp.upper" if held is None else f"{PREFIX}.level"
    assert with_loss(loss, **clamped, **SYNC) == ([] if level == held else [wrong])
    if held is not None:  # beside the loss the weight may be any ratio
        assert with_loss(loss, **clamped, algorithm__correction__objective="loglinear") == []


def test_a_refused_clamp_says_what_the_loss_bounds_itself() -> None:
    def told(loss: str) -> str:
        (problem,) = check_combinations(config_with(algorithm__loss=loss, algorithm__correction__clamp__upper=2.0))
        return str(problem)

    assert "algorithm.clip_high" in told("cispo")
    assert "gate of its own" in told("sapo")
    assert "sequence_mean" in told("gspo")


def test_a_loss_of_the_user_holds_the_ratio_of_the_token() -> None:
    clamped = {"algorithm__correction__clamp__upper": 2.0}
    assert held_ratio("my.loss") == "token"
    assert keys_refused(config_with(**OWN, **clamped)) == []
    assert keys_refused(config_with(**OWN, **clamped, algorithm__correction__level="sequence")) == [f"{PREFIX}.level"]
    with pytest.raises(ValueError, match=r"algorithm\.loss must be one of"):
        held_ratio("nothing")


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({}, ["algorithm.loss"]),
        (SYNC, []),
        ({"algorithm__correction__mask__upper": 5.0}, []),
        ({"algorithm__correction__reject__upper": 2.0}, []),
        ({"algorithm__loss": "dro"}, []),
        ({"algorithm__loss": "importance_sampling"}, []),
    ],
)
def test_a_loss_without_a_ratio_needs_samples_of_its_own_policy(keys: dict[str, Any], refused: list[str]) -> None:
    assert keys_refused(config_with(**{"algorithm__loss": "reinforce", **keys})) == refused


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=dapo", "correction=tis", "mode.max_staleness=2"],
        ["correction=icepop", f"{PREFIX}.objective=decoupled", "algorithm.loss=importance_sampling"],
        ["correction=tis", f"{PREFIX}.reject.metric=k3", f"{PREFIX}.reject.upper=0.1"],
        ["algorithm=gspo", "correction=tis", f"{PREFIX}.level=sequence_mean"],
        ["algorithm=dapo", "correction=a3po"],
        ["algorithm=rloo", "correction=decoupled"],
        ["algorithm=dapo", "correction=decoupled"],
        ["algorithm=reinforce", "mode=sync"],
        ["algorithm=reinforce", "correction=mis"],
    ],
)
def test_every_combination_that_the_documentation_names_is_accepted(overrides: list[str]) -> None:
    load_config(overrides)


def test_a_bound_that_someone_gives_beside_decoupled_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"algorithm\.clip_high") as caught:
        load_config(["algorithm=dapo", "correction=decoupled", "algorithm.clip_high=0.3"])
    assert "importance_sampling does not read it" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"algorithm__advantage": "grpo"}, ["rollout.top_k"]),
        ({"algorithm__advantage": "remax"}, ["rollout.top_k"]),
        ({"algorithm__advantage": "reinforce_pp"}, []),
        ({"algorithm__advantage": "gae"}, []),
        ({"algorithm__advantage": "grpo", "rollout__top_k": 2}, []),
    ],
)
def test_answers_that_are_compared_are_not_sampled_greedily(keys: dict[str, Any], refused: list[str]) -> None:
    assert (
        keys_refused(config_with(**{"rollout__top_k": 1, "algorithm__loss": "importance_sampling", **keys})) == refused
    )


WEIGHTED = {"algorithm__loss": "importance_sampling"}


@pytest.mark.parametrize(
    ("keys", "is_accepted"),
    [
        ({}, False),
        ({"algorithm__loss": "gspo"}, False),
        ({"algorithm__loss": "reinforce", "mode__name": "sync", "mode__max_staleness": 0}, False),
        ({"algorithm__loss": "my_package.loss"}, True),
        (WEIGHTED, True),
        (WEIGHTED | {"algorithm__correction__objective": "decoupled", "algorithm__correction__mask__upper": 5.0}, True),
        (WEIGHTED | {"algorithm__correction__clamp__upper": 2.0}, True),
        (WEIGHTED | {"algorithm__correction__clamp__lower": 0.5}, False),
        (WEIGHTED | {"algorithm__correction__mask__lower": 0.5}, False),
        (WEIGHTED | {"algorithm__correction__mask__metric": "k3", "algorithm__correction__mask__upper": 1.0}, False),
        (WEIGHTED | {"algorithm__correction__reject__upper": 2.0}, False),
        (WEIGHTED | {"algorithm__correction__objective": "loglinear"}, False),
        (WEIGHTED | {"algorithm__kl__coef": 0.1, "algorithm__kl__placement": "reward"}, False),
    ],
)
def test_a_part_of_the_vocabulary_is_sampled_only_where_nothing_acts_on_the_smaller_ratio(
    keys: dict[str, Any], is_accepted: bool
) -> None:
    for key, name, value in (("rollout.top_p", "rollout__top_p", 0.9), ("rollout.top_k", "rollout__top_k", 20)):
        refused = set(keys_refused(config_with(**keys, **{name: value}))) - set(keys_refused(config_with(**keys)))
        assert refused == (set() if is_accepted else {key})


AGENT = {"task__agent": "my_package.Loop"}
SHAPED = {"algorithm__overlong_buffer_tokens": 64}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"algorithm__advantage": "gpg", **SHAPED}, ["algorithm.gpg_scale"]),
        ({"algorithm__advantage": "gpg", **AGENT}, ["algorithm.gpg_scale"]),
        ({"algorithm__advantage": "gpg", "algorithm__gpg_scale": "valid_groups", **SHAPED, **AGENT}, []),
        ({"algorithm__advantage": "gdpo", **AGENT}, ["task.agent"]),
        ({"algorithm__advantage": "grpo", **SHAPED, **AGENT}, []),
        ({**SHAPED, "algorithm__overlong_penalty": 0.0}, ["algorithm.overlong_penalty"]),
        ({**SHAPED, "algorithm__overlong_penalty": 0.5}, []),
        ({"algorithm__overlong_penalty": 0.5}, ["algorithm.overlong_penalty"]),
    ],
)
def test_rewards_are_not_moved_under_an_estimator_that_counts_or_parts_them(
    keys: dict[str, Any], refused: list[str]
) -> None:
    assert keys_refused(config_with(**keys)) == refused


@pytest.mark.parametrize(
    ("warmup", "alone", "advantage", "refused"),
    [
        (60, 30, "gae", []),
        (70, 30, "gae", ["learner.warmup_steps"]),
        (99, 0, "grpo", []),
        (100, 0, "grpo", ["learner.warmup_steps"]),
    ],
)
def test_the_learning_rate_has_the_steps_that_the_critics_warmup_leaves(
    warmup: int, alone: int, advantage: str, refused: list[str]
) -> None:
    config = config_with(
        learner__lr_schedule="cosine",
        learner__warmup_steps=warmup,
        critic__warmup_steps=alone,
        algorithm__advantage=advantage,
        trainer__total_steps=100,
    )
    assert keys_refused(config) == refused
