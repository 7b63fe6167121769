"""Agent loops and greedy baselines from the configuration to the rollout workers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.fakes.chat_tokenizer import PLAIN, THINKING, chat_tokenizer
from trainer.config.algorithm import ESTIMATORS
from trainer.config.compose import load_config
from trainer.driver.actors import group_timeout_s, worker_spec
from trainer.driver.preflight import check_inputs, log_inputs, make_agent
from trainer.errors import ConfigurationError
from trainer.telemetry.console import FILE_ONLY

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
class Loop:
    def __init__(self, turns=1): ...
    async def run(self, prompt, max_tokens, generate): ...

def not_a_loop():
    return 3

def half(number: int) -> float:
    \"\"\"Half as much.

    Args:
        number: any
    \"\"\"
    return number / 2

def double(number: int) -> int:
    \"\"\"Twice as much.

    Args:
        number: any
    \"\"\"
    return 2 * number
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_for_preflight.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("args", ["{}", "{turns: 2}"])
def test_a_loop_that_can_be_made_passes(args: str) -> None:
    make_agent(load_config(["task.agent=agents_for_preflight.Loop", f"task.agent_args={args}"]))
    make_agent(load_config([]))


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
        make_agent(load_config(overrides))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_workers_make_a_greedy_baseline_for_the_estimator_that_needs_one_and_for_no_other(name: str) -> None:
    needed = ["algorithm.kl.coef=1", "algorithm.kl.reference_model=builtin:tiny"] if name == "zero" else []
    spec = worker_spec(load_config([f"algorithm.advantage_estimator={name}", *needed]))
    assert spec.greedy_baseline == (name == "remax")


def test_workers_get_the_loop_with_its_arguments_and_its_limit() -> None:
    single = worker_spec(load_config([]))
    assert (single.agent, single.agent_args, single.agent_timeout_s) == ("", {}, None)
    overrides = ["task.agent=my.loop", "task.agent_args={turns: 2}", "task.agent_timeout_s=900"]
    spec = worker_spec(load_config(overrides))
    assert (spec.agent, spec.agent_args, spec.agent_timeout_s) == ("my.loop", {"turns": 2}, 900.0)


def test_the_driver_waits_as_long_as_a_trajectory_may_take() -> None:
    short = ["rollout.request_timeout_s=100", "task.reward.timeout_s=10"]
    agent = [*short, "task.agent=my.loop", "task.agent_timeout_s=900"]
    assert group_timeout_s(load_config(agent)) - group_timeout_s(load_config(short)) == 800


@pytest.mark.parametrize("agent", ["agents_for_preflight.Loop", ""])
def test_prompts_keep_their_messages_for_agents_alone(agent: str) -> None:
    inputs = check_inputs(load_config([f"task.agent={agent}", "task.apply_chat_template=true"]))
    for prompt in (inputs.train.prompts[0], inputs.evaluation[0].prompts[0]):
        assert list(prompt.messages) == ([{"role": "user", "content": prompt.text}] if agent else [])


def shown_by(
    tmp_path: Path, template: str, *overrides: str, tools: str = "agents_for_preflight.double", more: str = ""
) -> list[str]:
    """What a run with these tools says of its prompts, where the agent's tokenizer has this template.

    `more`: arguments of the agent."""
    chat_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    args = f"tokenizer: {tmp_path / 'tokenizer'}, tools: [{tools}]{more}"
    agent = ["task.agent=rollout.agent.tools.tool_agent", f"task.agent_args={{{args}}}"]
    cfg = load_config(
        ["device=cpu", "task.apply_chat_template=true", "task.max_prompt_tokens=2000", *agent, *overrides]
    )
    return list(check_inputs(cfg).left_out)


def test_tools_that_the_prompts_do_not_name_are_told_on_the_screen_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = shown_by(tmp_path, PLAIN)
    assert "the chat template shows no tools, and the training prompts do not name double (in 0 of " in text
    for way in ("reads `tools`", "task.system_prompt", "tools_in_prompt=false"):
        assert way in text
    (on_screen,) = [record for record in caplog.records if "double" in record.getMessage()]
    assert (on_screen.levelname, on_screen.getMessage()) == ("WARNING", text)
    assert not hasattr(on_screen, *FILE_ONLY)
    caplog.clear()
    cfg = load_config([])
    log_inputs(cfg, replace(check_inputs(cfg), left_out=(text,)))
    in_file = next(record for record in caplog.records if record.levelname == "WARNING")
    assert in_file.getMessage() == text and in_file.__dict__.items() >= FILE_ONLY.items()


@pytest.mark.parametrize(
    ("prompt", "is_told"),
    [("You may call double.", False), ("You may call double_it.", True), ("It is doubled.", True)],
)
def test_a_tool_that_the_system_prompt_names_is_known_to_the_policy(tmp_path: Path, prompt: str, is_told: bool) -> None:
    assert bool(shown_by(tmp_path, PLAIN, f"task.system_prompt={prompt}")) == is_told


def test_a_tool_that_a_few_prompts_name_by_chance_is_told_with_their_number(tmp_path: Path) -> None:
    for name, some, digit in (("train", "how much is double that?", 1), ("test", "?", 3)):
        rows = [{"prompt": text, "answer": "2"} for text in (some, f"{digit}+1=", f"{digit}+0=")]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"task.{key}_path={tmp_path / name}.jsonl" for key, name in (("train", "train"), ("eval", "test"))]
    (text,) = shown_by(tmp_path, PLAIN, "task.reader=jsonl", *data)
    assert "do not name double (in 1 of 3): " in text


def test_several_tools_are_told_together(tmp_path: Path) -> None:
    tools = "agents_for_preflight.double, agents_for_preflight.half, math.sqrt"
    (text,) = shown_by(tmp_path, PLAIN, "task.system_prompt=You may call half.", tools=tools)
    assert re.search(r"do not name double \(in 0 of \d+\), sqrt \(in 0 of \d+\): ", text)


def test_nothing_is_told_where_it_is_left_to_the_prompts_or_the_agent_has_no_tools(tmp_path: Path) -> None:
    assert shown_by(tmp_path, PLAIN, more=", tools_in_prompt: false") == []
    cfg = load_config(["device=cpu", "task.agent=agents_for_preflight.Loop"])
    assert check_inputs(cfg).left_out == ()


def test_a_template_that_is_given_tools_and_does_not_show_them_is_told(tmp_path: Path) -> None:
    """That of the agent's tokenizer reads them, that of the model does not."""
    (text,) = shown_by(tmp_path, THINKING)
    assert (
        "the chat template is given the tools and does not show them, and the training prompts do not name double"
        in text
    )
