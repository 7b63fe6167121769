"""Arguments and tools of chat templates, from the configuration to the prompts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rollout.agent.runner import make_loop
from rollout.errors import DataError
from rollout.prompts.prompt_source import PromptSource
from tests.fakes.chat_tokenizer import PLAIN, THINKING, chat_tokenizer
from trainer.config.compose import load_config
from trainer.driver.actors import worker_spec
from trainer.driver.datasets import load_data
from trainer.driver.preflight import make_agent, shown_tools
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.types import Prompt
    from trainer.config.schema import RunConfig

TOOL = '''
def double(number: int) -> int:
    """Twice as much.

    Args:
        number: any
    """
    return 2 * number
'''
OFF = "task.chat_template_kwargs={enable_thinking: false}"
CLOSED = "<think>\n\n</think>\n\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("train", "test"):
        rows = [{"prompt": [{"role": "user", "content": f"{name} {n}"}], "answer": "2"} for n in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tools_of_inputs.py").write_text(TOOL)
    chat_tokenizer(THINKING).save_pretrained(tmp_path / "tokenizer")


def config(*overrides: str) -> RunConfig:
    data = ["task.train_path=train.jsonl", "task.eval_path=test.jsonl", "task.max_prompt_tokens=2000"]
    return load_config(["device=cpu", *data, *overrides])


def prompts(*overrides: str, template: str = THINKING) -> tuple[Prompt, ...]:
    cfg = config(*overrides)
    data = load_data(cfg, chat_tokenizer(template), tools=shown_tools(make_agent(cfg)))
    return (*data.train.prompts, *data.evaluation[0].prompts)


def test_arguments_reach_the_template_of_training_and_held_out_prompts() -> None:
    assert [prompt.text.endswith(CLOSED) for prompt in prompts()] == [False] * 4
    assert [prompt.text.endswith(CLOSED) for prompt in prompts(OFF)] == [True] * 4


def test_the_tools_of_the_agent_are_shown_by_the_template() -> None:
    agent = "task.agent=rollout.agent.tools.tool_agent"
    args = "tokenizer: tokenizer, tools: [tools_of_inputs.double]"
    for prompt in prompts(agent, f"task.agent_args={{{args}}}"):
        assert '"name": "double"' in prompt.text
        assert prompt.text.startswith("<|im_start|>system")
    for prompt in prompts(agent, f"task.agent_args={{{args}, tools_in_prompt: false}}"):
        assert "double" not in prompt.text


@pytest.mark.parametrize(
    ("argument", "template", "message"),
    [
        ("{thinking: false}", THINKING, "never reads thinking; it reads enable_thinking"),
        ("{enable_thinking: false}", PLAIN, "never reads enable_thinking; it reads nothing but the messages"),
        ("{tools: []}", THINKING, "tools cannot be set: rendering a prompt sets it"),
    ],
)
def test_an_argument_that_changes_nothing_is_refused(argument: str, template: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        prompts(f"task.chat_template_kwargs={argument}", template=template)
    assert caught.value.problems[0].key == "task.chat_template_kwargs"


def test_an_argument_for_prompts_that_go_through_no_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"task\.chat_template_kwargs is set, but this prompt is a plain string"):
        prompts(OFF)
    assert prompts(OFF, "task.apply_chat_template=true")[0].text.endswith(CLOSED)


def test_tools_for_prompts_that_go_through_no_template_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    args = "task.agent_args={tokenizer: tokenizer, tools: [tools_of_inputs.double]}"
    with pytest.raises(DataError, match=r"shows its tools in the prompt, but .*, or tools_in_prompt=false"):
        prompts("task.agent=rollout.agent.tools.tool_agent", args)


def test_values_that_json_cannot_say_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.chat_template_kwargs.*\n? *must be values of JSON"):
        config("task.chat_template_kwargs={temperature: nan}")


def test_a_run_does_not_go_on_with_other_arguments() -> None:
    def source(*overrides: str) -> PromptSource:
        data = load_data(config(*overrides), chat_tokenizer(THINKING))
        return PromptSource(data.train, seed=0, shuffle=True)

    state = source(OFF).state_dict()
    source(OFF).load_state_dict(state)
    with pytest.raises(DataError, match=r"fingerprint was .*arguments and tools of the chat template"):
        source().load_state_dict(state)


FACTORY = """
class Loop:
    def __init__(self, chat_template_kwargs): self.seen = chat_template_kwargs
    async def run(self, prompt, max_tokens, generate): ...
"""


def test_loops_that_ask_for_the_arguments_get_them_in_driver_and_workers(tmp_path: Path) -> None:
    (tmp_path / "asking_loop.py").write_text(FACTORY)
    cfg = config(OFF, "task.agent=asking_loop.Loop")
    make_agent(cfg)
    spec = worker_spec(cfg)
    loop = make_loop(spec.agent, spec.agent_args, chat_template_kwargs=spec.chat_template_kwargs)
    assert loop.seen == {"enable_thinking": False}  # type: ignore[attr-defined]
    own = make_loop(spec.agent, {"chat_template_kwargs": {}}, chat_template_kwargs=spec.chat_template_kwargs)
    assert own.seen == {}, "what the arguments of the agent say goes first"  # type: ignore[attr-defined]
