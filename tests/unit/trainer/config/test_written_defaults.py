"""A key that nothing reads is refused when it is asked for by name, even with the value that it has anyway."""

from __future__ import annotations

import pytest

from trainer.config.compose import load_config
from trainer.errors import ConfigurationError


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm=reinforce", "mode=sync", "algorithm.clip_high=0.2"], "algorithm.clip_high"),
        (["algorithm=rloo", "algorithm.normalize_by_std=true"], "algorithm.normalize_by_std"),
        (["algorithm=grpo", "++algorithm.whiten_advantages=true"], "algorithm.whiten_advantages"),
        (["algorithm=ppo", "critic.shared_backbone=true", "critic.max_grad_norm=1.0"], "critic.max_grad_norm"),
        (["algorithm.advantage=my.own_estimator", "algorithm.normalize_by_std=true"], "algorithm.normalize_by_std"),
        (["algorithm.overlong_penalty=1.0"], "algorithm.overlong_penalty"),
        (["algorithm.kl.estimator=k3"], "algorithm.kl.estimator"),
    ],
)
def test_a_default_that_is_asked_for_and_not_read_is_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(overrides)
    (problem,) = caught.value.problems
    assert problem.key == key and "has no effect" in problem.allowed and problem.do == "leave it out"


@pytest.mark.parametrize(
    "overrides",
    [
        # Takes back what the preset says.
        ["algorithm=dapo", "correction=decoupled", "algorithm.clip_high=0.2"],
        # Is read.
        ["algorithm=dapo", "algorithm.clip_low=0.2", "algorithm.normalize_by_std=true"],
        # Turns off what is off.
        ["algorithm=gdpo", "algorithm.overlong_buffer_tokens=0", "critic.lr=null", "algorithm.gdpo_weights={}"],
        # Nobody asks for the defaults of keys that no override names.
        ["algorithm=reinforce", "mode=sync"],
    ],
)
def test_a_default_that_says_what_happens_is_accepted(overrides: list[str]) -> None:
    load_config(overrides)
