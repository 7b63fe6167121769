"""Agent loops and greedy baselines from the configuration to the rollout workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainer.config.errors import ConfigurationError
from trainer.config.estimators import ESTIMATORS
from trainer.config.load import load_config
from trainer.pipeline.compose import make_pool, worker_spec
from trainer.pipeline.inputs import load_inputs
from trainer.pipeline.preflight import check_agent

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
class Loop:
    def __init__(self, turns=1): ...
    async def run(self, prompt, max_tokens, generate): ...

def not_a_loop():
    return 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_for_preflight.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("args", ["{}", "{turns: 2}"])
def test_a_loop_that_can_be_made_passes(args: str) -> None:
    check_agent(load_config(["task.agent=agents_for_preflight.Loop", f"task.agent_args={args}"]))
    check_agent(load_config([]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.agent=loop"], r"task\.agent = loop\n .*is no dotted path; give package\.module\.name"),
        (["task.agent=agents_for_preflight.Lop"], "did you mean 'Loop'"),
        (["task.agent=nowhere.Loop"], "does not import: ModuleNotFoundError"),
        (["task.agent=agents_for_preflight.not_a_loop"], "returned a int, which has no method run; give"),
        (["task.agent=agents_for_preflight.Loop", "task.agent_args={n: 1}"], "unexpected keyword argument 'n'"),
    ],
)
def test_a_loop_that_cannot_is_a_configuration_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_agent(load_config(overrides))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_workers_make_a_greedy_baseline_for_the_estimator_that_needs_one_and_for_no_other(name: str) -> None:
    needed = ["algorithm.kl.coef=1", "algorithm.kl.path=builtin:tiny"] if name == "zero" else []
    spec = worker_spec(load_config([f"algorithm.advantage={name}", *needed]))
    assert spec.greedy_baseline == (name == "remax")


def test_workers_get_the_loop_with_its_arguments_and_its_limit() -> None:
    single = worker_spec(load_config([]))
    assert (single.agent, single.agent_args, single.agent_timeout_s) == ("", {}, None)
    overrides = ["task.agent=my.loop", "task.agent_args={turns: 2}", "task.agent_timeout_s=900"]
    spec = worker_spec(load_config(overrides))
    assert (spec.agent, spec.agent_args, spec.agent_timeout_s) == ("my.loop", {"turns": 2}, 900.0)


def test_the_driver_waits_as_long_as_a_trajectory_may_take() -> None:
    short = ["rollout.request_timeout_s=100", "task.reward.timeout_s=10"]
    actors = type("Actors", (), {"workers": ()})()
    single = make_pool(load_config(short), None, actors)
    agent = make_pool(load_config([*short, "task.agent=my.loop", "task.agent_timeout_s=900"]), None, actors)
    assert agent._group_timeout_s - single._group_timeout_s == 800


@pytest.mark.parametrize("agent", ["agents_for_preflight.Loop", ""])
def test_prompts_keep_their_messages_for_agents_alone(agent: str) -> None:
    inputs = load_inputs(load_config([f"task.agent={agent}", "task.apply_chat_template=true"]))
    for prompt in (inputs.train.prompts[0], inputs.evaluation[0].prompts[0]):
        assert list(prompt.messages) == ([{"role": "user", "content": prompt.text}] if agent else [])
