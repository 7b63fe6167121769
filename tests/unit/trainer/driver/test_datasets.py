"""A configuration -> data sets, rewards and the order of prompts, and what is refused or warned of before the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rollout.agent.runner import make_loop
from rollout.errors import DataError
from tests.fakes.chat_tokenizer import PLAIN, THINKING, chat_tokenizer
from tests.fakes.scripted_run import config, prompt_set
from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.compose import load_config
from trainer.config.schema import TaskConfig
from trainer.driver.actors import worker_spec
from trainer.driver.datasets import curriculum_of, load_data, make_source, pass_rates_of
from trainer.driver.models import lost_characters
from trainer.driver.preflight import check_inputs, log_inputs, make_agent, shown_tools
from trainer.errors import ConfigurationError
from trainer.telemetry.console import FILE_ONLY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.types import Prompt
    from trainer.config.schema import RunConfig
    from trainer.driver.datasets import DataSets

pytestmark = pytest.mark.usefixtures("here")


def write(name: str, *rows: Mapping[str, Any] | str | list[Any]) -> str:
    """A file in the working directory; a row that is no mapping is a prompt."""
    full = [row if isinstance(row, dict) else {"prompt": row, "answer": "2"} for row in rows]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in full), encoding="utf-8")
    return name


def data(train: list[Any], held_out: list[Any] | str = "5+5=", *, step: int | None = None) -> list[str]:
    """Overrides that name files with these rows; a step takes all training prompts unless `step` is given."""
    rows = [held_out] if isinstance(held_out, str) else held_out
    paths = [f"task.train_path={write('train.jsonl', *train)}", f"task.eval_path={write('test.jsonl', *rows)}"]
    return [*paths, f"trainer.groups_per_step={len(train) if step is None else step}"]


def cfg_of(*overrides: str) -> RunConfig:
    return load_config(["device=cpu", *overrides])


def checked(*overrides: str) -> DataSets:
    return check_inputs(cfg_of(*overrides))[0]


def logged(*overrides: str, inputs: DataSets, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level("INFO"):
        log_inputs(cfg_of(*overrides), inputs)
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


# --- sets ---


def test_training_and_held_out_prompts_are_disjoint() -> None:
    loaded = checked()
    held_out = loaded.evaluation[0].prompts
    assert (len(loaded.train.prompts), len(held_out), loaded.notes) == (50 * 50 - 250, 250, ())
    assert not {p.text for p in loaded.train.prompts} & {p.text for p in held_out}
    assert build_tokenizer().decode(held_out[0].token_ids) == held_out[0].text


def test_a_set_is_read_as_it_says_and_otherwise_as_the_task_does(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"{n}+5=", "solution": {"final": str(n + 5)}} for n in range(6)]
    write("other.jsonl", *rows, rows[0])
    columns = "path: other.jsonl, prompt_column: question, answer_column: solution.final"
    sums = "path: 'builtin:arithmetic', split: train, size: 5"
    sets = f"task.eval_sets={{other: {{{columns}, samples: 8}}, few: {{{columns}, size: 2}}, sums: {{{sums}}}}}"
    paths = [*data(["1+1="], "1+2="), "trainer.eval_temperature=1", "trainer.eval_samples=3"]
    loaded = load_data(cfg_of(*paths, sets), chat_tokenizer(PLAIN))
    found = [(one.name, len(one.prompts), one.num_samples) for one in loaded.evaluation]
    assert found == [("", 1, 3), ("other", 6, 8), ("few", 2, 3), ("sums", 5, 3)]
    assert [(p.text, p.answer) for p in loaded.evaluation[1].prompts[:2]] == [("0+5=", "5"), ("1+5=", "6")]
    lines = logged(*paths, sets, inputs=loaded, caplog=caplog)
    assert lines[0] == "INFO 1 training prompts, 1 held out, other 6, few 2, sums 5"
    assert "rows of task.eval_sets.other.path that were skipped: 1 that repeat" in lines[1]
    with pytest.raises(DataError, match=r"task\.eval_sets\.wrong: other\.jsonl, line 1: no column 'prompt'"):
        load_data(cfg_of(*paths, "task.eval_sets={wrong: {path: other.jsonl}}"), chat_tokenizer(PLAIN))


def test_one_directory_for_two_sets_is_refused_where_splits_are_not_read(here: Path) -> None:
    (here / "data").mkdir()
    for name in ("train", "test"):
        write(f"data/{name}.jsonl", "1+1=")
    with pytest.raises(DataError, match="both read"):
        checked("task.train_path=data", "task.eval_path=data")
    message = r"task\.train_path=data and task\.eval_sets\.all\.path=data both read .* task\.eval_sets\.all\.split=dev"
    more = ["trainer.eval_temperature=1", "task.eval_sets={all: {path: data, split: dev}}"]
    with pytest.raises(DataError, match=message):
        checked("task.train_path=data", f"task.eval_path={write('held_out.jsonl', '1+2=')}", *more)


# --- warnings ---


def test_rows_that_are_left_out_are_counted_by_data_set_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    short, long = "1+1=", "1+" * 20 + "1="
    overrides = data([short, short, short, long], ["1 + 1=", long], step=1)
    overrides += ["task.overlong_prompts=filter", "task.max_prompt_tokens=16"]
    left_out = "WARNING rows of {} that were skipped: {} that repeat an earlier one (task.dedup), 1 over {}=16"
    assert logged(*overrides, inputs=checked(*overrides), caplog=caplog) == [
        "INFO 1 training prompts, 1 held out",
        left_out.format("task.train_path", 2, "task.max_prompt_tokens"),
        left_out.format("task.eval_path", 0, "task.max_prompt_tokens"),
        "INFO weights: those of builtin:tiny",
    ]


THREE = ["1+1=", "A b", "c"]


@pytest.mark.parametrize(
    ("train", "held_out", "step", "note"),
    [
        pytest.param(THREE, THREE, 3, "3 of 3 prompts of task.eval_path are among those of task.train_path: ",
                     id="all are trained on"),
        pytest.param(THREE, ["a   B", "1+2=", "c"], 3, "2 of 3 prompts of task.eval_path are among those of ",
                     id="white space and case do not count"),
        pytest.param(THREE, "5+5=", 64, "task.train_path has 3 prompts, fewer than trainer.groups_per_step=64: ",
                     id="fewer prompts than a step takes"),
        pytest.param(THREE, "5+5=", 3, "", id="as many as a step takes"),
        pytest.param([f"what is {n}? é日" for n in range(100)], "5+5=", 4,
                     "the tokenizer loses 100 characters (é 日) of 50 prompts that were decoded: 'what is 0? é日' ",
                     id="lost characters"),
    ],
)  # fmt: skip
def test_data_that_is_rarely_meant_is_warned_of_once(
    train: list[Any], held_out: Any, step: int, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    notes = checked(*data(train, held_out, step=step), "task.max_prompt_tokens=64").notes
    assert [one.startswith(note) for one in notes] == [True] * bool(note)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [*notes]


@pytest.mark.parametrize("text", ["what is 3? é日", "a  b\n c", "ﬁne", "<eos>user\nx", ""])
def test_a_tokenizer_of_bytes_loses_no_character(text: str) -> None:
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(alphabet, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    prompt = replace(prompt_set(1).prompts[0], text=text, token_ids=tokenizer(text)["input_ids"])
    assert list(lost_characters(tokenizer, [prompt])) == []


# --- chat templates and tools ---

TOOLS = '''
def double(number: int) -> int:
    """Twice as much.

    Args:
        number: any
    """
    return 2 * number

def half(number: int) -> float:
    """Half as much.

    Args:
        number: any
    """
    return number / 2
'''
OFF = "task.chat_template_kwargs={enable_thinking: false}"
CLOSED = "<think>\n\n</think>\n\n"
TOOL_AGENT = "task.agent=rollout.agent.tools.tool_agent"
CHAT = ["task.train_path=train.jsonl", "task.eval_path=test.jsonl", "task.max_prompt_tokens=2000"]


@pytest.fixture
def chats(here: Path) -> Path:
    for name in ("train", "test"):
        rows = [{"prompt": [{"role": "user", "content": f"{name} {n}"}], "answer": "2"} for n in range(2)]
        write(f"{name}.jsonl", *rows)
    (here / "tools_for_datasets.py").write_text(TOOLS)
    chat_tokenizer(THINKING).save_pretrained(here / "tokenizer")
    return here


def rendered(*overrides: str, template: str = THINKING) -> tuple[Prompt, ...]:
    cfg = cfg_of(*CHAT, *overrides)
    return load_data(cfg, chat_tokenizer(template), tools=shown_tools(make_agent(cfg))).prompts


def agent_args(more: str = "", tools: str = "tools_for_datasets.double", tokenizer: str = "tokenizer") -> str:
    return f"task.agent_args={{tokenizer: {tokenizer}, tools: [{tools}]{more}}}"


def test_arguments_and_tools_reach_the_template_of_training_and_held_out_prompts(chats: Path) -> None:
    assert [prompt.text.endswith(CLOSED) for prompt in rendered()] == [False] * 4
    assert [prompt.text.endswith(CLOSED) for prompt in rendered(OFF)] == [True] * 4
    for prompt in rendered(TOOL_AGENT, agent_args()):
        assert '"name": "double"' in prompt.text and prompt.text.startswith("<|im_start|>system")
    assert not any("double" in prompt.text for prompt in rendered(TOOL_AGENT, agent_args(", tools_in_prompt: false")))


@pytest.mark.parametrize(
    ("argument", "message"),
    [("{thinking: false}", "never reads thinking; it reads enable_think"), ("{temperature: nan}", "JSON values")],
)
def test_an_argument_that_changes_nothing_is_refused(argument: str, message: str, chats: Path) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        rendered(f"task.chat_template_kwargs={argument}")
    assert caught.value.problems[0].key == "task.chat_template_kwargs"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([OFF], r"task\.chat_template_kwargs is set, but this prompt is a plain string"),
        ([TOOL_AGENT, agent_args()], r"shows its tools in the prompt, but .*, or tools_in_prompt=false"),
    ],
)
def test_arguments_and_tools_for_prompts_that_go_through_no_template_are_refused(
    overrides: list[str], message: str, chats: Path
) -> None:
    write("train.jsonl", "1+1=")
    with pytest.raises(DataError, match=message):
        rendered(*overrides)
    assert rendered(OFF, "task.apply_chat_template=true")[0].text.endswith(CLOSED)


def test_a_run_is_not_resumed_with_other_arguments(chats: Path) -> None:
    def source(*overrides: str) -> Any:
        cfg = cfg_of(*CHAT, *overrides)
        return make_source(cfg, load_data(cfg, chat_tokenizer(THINKING)).train, None)

    state = source(OFF).state_dict()
    source(OFF).load_state_dict(state)
    with pytest.raises(DataError, match=r"fingerprint was .*arguments and tools of the chat template"):
        source().load_state_dict(state)


def test_loops_that_ask_for_the_arguments_get_them_in_driver_and_workers(chats: Path) -> None:
    loop = "class Loop:\n    def __init__(self, chat_template_kwargs): self.seen = chat_template_kwargs\n"
    (chats / "asking_loop.py").write_text(f"{loop}    async def run(self, prompt, max_tokens, generate): ...\n")
    cfg = cfg_of(OFF, "task.agent=asking_loop.Loop", *CHAT)
    spec = worker_spec(cfg)
    made = [make_agent(cfg), make_loop(spec.agent, spec.agent_args, chat_template_kwargs=spec.chat_template_kwargs)]
    assert [one.seen for one in made] == [{"enable_thinking": False}] * 2  # type: ignore[attr-defined]
    own: Any = make_loop(spec.agent, {"chat_template_kwargs": {}}, chat_template_kwargs=spec.chat_template_kwargs)
    assert own.seen == {}, "the arguments of the agent go first"


@pytest.mark.parametrize("agent", ["rollout.agent.loop.SingleTurnLoop", ""])
def test_prompts_keep_their_messages_for_agents_alone(agent: str) -> None:
    inputs = checked(f"task.agent={agent}", "task.apply_chat_template=true")
    for prompt in (inputs.train.prompts[0], inputs.evaluation[0].prompts[0]):
        assert list(prompt.messages) == ([{"role": "user", "content": prompt.text}] if agent else [])


def notes_on_tools(template: str, *overrides: str, **args: str) -> list[str]:
    """Notes on the prompts of a run with these tools, where the agent's tokenizer has this template."""
    chat_tokenizer(template).save_pretrained("agents")
    sizes = ["task.apply_chat_template=true", "task.max_prompt_tokens=100"]
    return list(checked(*sizes, TOOL_AGENT, agent_args(tokenizer="agents", **args), *overrides).notes)


def test_tools_that_the_prompts_do_not_name_are_warned_of_on_the_screen_and_in_the_log(
    chats: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = notes_on_tools(PLAIN)
    for words in (
        "the chat template shows no tools, and the training prompts do not name double (in 0 of ",
        *("reads `tools`", "task.system_prompt", "tools_in_prompt=false"),
    ):
        assert words in text
    (on_screen,) = [record for record in caplog.records if "double" in record.getMessage()]
    assert (on_screen.levelname, on_screen.getMessage()) == ("WARNING", text)
    assert not hasattr(on_screen, *FILE_ONLY)
    assert f"WARNING {text}" in logged(inputs=replace(checked(), notes=(text,)), caplog=caplog)
    in_file = next(record for record in caplog.records if record.levelname == "WARNING")
    assert in_file.__dict__.items() >= FILE_ONLY.items()


@pytest.mark.parametrize(
    ("template", "prompt", "args", "expected"),
    [
        (PLAIN, "You may call double.", {}, ""),
        (PLAIN, "You may call double_it.", {}, "shows no tools"),
        (PLAIN, "It is doubled.", {}, "shows no tools"),
        (PLAIN, "?", {"more": ", tools_in_prompt: false"}, ""),
        # The template of the agent's tokenizer reads them, that of the model does not.
        (THINKING, "?", {}, "is given the tools and does not show them, and the training prompts do not name double"),
        (
            PLAIN,
            "You may call half.",
            {"tools": "tools_for_datasets.double, tools_for_datasets.half, math.sqrt"},
            "do not name double (in 0 of 2250), sqrt (in 0 of 2250): ",
        ),
    ],
)
def test_a_tool_that_the_system_prompt_names_is_known_to_the_policy(
    template: str, prompt: str, args: dict[str, str], expected: str, chats: Path
) -> None:
    notes = notes_on_tools(template, f"task.system_prompt={prompt}", **args)
    assert len(notes) == bool(expected) and expected in "".join(notes)


def test_a_tool_that_a_few_prompts_name_by_chance_is_warned_of_with_their_number(chats: Path) -> None:
    paths = data(["how much is double that?", "1+1=", "1+0="], ["?", "3+1=", "3+0="])
    (text,) = notes_on_tools(PLAIN, *paths)
    assert "do not name double (in 1 of 3): " in text


# --- rewards ---

REWARDS = {
    "with_parts.py": "def reward(*, prompt, response, answer, metadata): return dict(reward=1, correct=1, format=0)",
    "plain.py": "def reward(*, prompt, response, answer, metadata): return 1.0",
    "parts_estimator.py": """
from trainer.config.algorithm import EstimatorTraits, with_traits

@with_traits(EstimatorTraits(needs_peers=True, uses_parts=True))
def of_parts(groups):
    return [group.rewards_G for group in groups]
""",
}
CUSTOM = "algorithm.advantage_estimator=parts_estimator.of_parts"


@pytest.fixture
def rewards(here: Path) -> None:
    for name, text in REWARDS.items():
        (here / name).write_text(text)


@pytest.mark.parametrize(
    ("reward", "overrides", "key"),
    [
        ("with_parts.py", ["algorithm=gdpo", "algorithm.gdpo_weights={correct: 1, format: 0.5}"], ""),
        ("plain.py", ["algorithm=grpo"], ""),
        ("plain.py", ["algorithm=gdpo"], "algorithm.advantage_estimator"),
        ("plain.py", [CUSTOM], "algorithm.advantage_estimator"),
        ("with_parts.py", ["algorithm=gdpo", "algorithm.gdpo_weights={fromat: 0.5}"], "algorithm.gdpo_weights"),
    ],
)
def test_a_reward_gives_the_parts_that_the_estimator_reads(
    reward: str, overrides: list[str], key: str, rewards: None
) -> None:
    overrides = [*overrides, f"task.reward.name={reward}:reward"]
    if not key:
        assert checked(*overrides).train.prompts
        return
    with pytest.raises(ConfigurationError, match=r"returns none|correct, format") as caught:
        checked(*overrides)
    assert [problem.key for problem in caught.value.problems] == [key]


def mixed(*names: str | None, algorithm: str = "grpo") -> list[str]:
    write("mixed.jsonl", *({"prompt": f"{n}+1=", "answer": "2", "by": name} for n, name in enumerate(names)))
    paths = ["task.train_path=mixed.jsonl", "task.reward.column=by", "trainer.groups_per_step=1"]
    return [f"algorithm={algorithm}", "task.reward.name=with_parts.py:reward", *paths]


def test_prompts_come_with_the_rewards_that_their_rows_name(rewards: None, caplog: pytest.LogCaptureFixture) -> None:
    overrides = mixed(None, "plain.py:reward", "plain.py:reward", "arithmetic")
    loaded = checked(*overrides)
    assert [p.reward for p in loaded.train.prompts] == ["", "plain.py:reward", "plain.py:reward", "arithmetic"]
    assert {p.reward for p in loaded.evaluation[0].prompts} == {""}
    counts = f"with_parts.py:reward {1 + len(loaded.evaluation[0].prompts)}, plain.py:reward 2, arithmetic 1"
    assert f"INFO prompts by reward: {counts}" in logged(*overrides, inputs=loaded, caplog=caplog)


def test_a_reward_of_a_row_that_cannot_be_used_is_refused_with_its_place(rewards: None) -> None:
    with pytest.raises(DataError, match=r"column 'by' of prompt mixed/2: .*nowhere"):
        checked(*mixed(None, "nowhere.py:reward"))
    with pytest.raises(ConfigurationError, match=r"plain\.py:reward returns none"):
        checked(*mixed(None, "plain.py:reward", algorithm="gdpo"))


# --- the order of prompts ---

CURRICULUM: dict[str, Any] = {"curriculum": "easy_to_hard"}
FILTER: dict[str, Any] = {"pass_rate_min": 0.1, "pass_rate_max": 0.9, "pass_rate_column": "rate"}


def with_columns(*columns: dict[str, object]) -> tuple[Prompt, ...]:
    return tuple(replace(p, metadata=c) for p, c in zip(prompt_set(len(columns)).prompts, columns, strict=True))


def test_difficulty_is_the_column_or_the_rarity_of_a_pass() -> None:
    rows = with_columns({"level": 1, "rate": 0.2}, {"level": 2, "rate": 0.8})
    by_level = curriculum_of(TaskConfig(**CURRICULUM, difficulty_column="level", curriculum_epochs=3), rows)
    by_rate = curriculum_of(TaskConfig(**CURRICULUM, pass_rate_column="rate"), rows)
    assert by_level is not None and by_rate is not None
    assert (by_level.difficulties.tolist(), by_level.num_epochs) == ([1.0, 2.0], 3)
    assert by_rate.difficulties.tolist() == [-0.2, -0.8]
    assert curriculum_of(TaskConfig(), rows) is None and pass_rates_of(TaskConfig(), rows) is None


def test_a_pass_rate_may_be_unknown() -> None:
    rates = pass_rates_of(TaskConfig(**FILTER), with_columns({"rate": 0.0}, {"rate": None}, {"rate": 0.5}))
    assert rates is not None
    assert (rates.record()["prompts_excluded"], rates.record()["pass_rate_mean"]) == (1, 0.25)


BY_LEVEL = CURRICULUM | {"difficulty_column": "level"}


@pytest.mark.parametrize(
    ("keys", "columns", "words"),
    [
        (FILTER, [{}], "no column 'rate'; .* set task.pass_rate_column"),
        (FILTER, [{"rate": 80}], r"prompt train/0: column 'rate' holds 80; .* shares, 0 to 1"),
        (FILTER, [{"rate": 0.0}], "from the start"),
        (BY_LEVEL, [{}], "no column 'level'; .* set task.difficulty_column"),
        (BY_LEVEL, [{"level": 1}, {"level": None}], r"prompt train/1: column 'level' \(task.difficulty_.*\) is null"),
    ],
)
def test_a_column_that_does_not_fit_or_leaves_no_prompt_is_refused_before_the_run(
    keys: dict[str, Any], columns: list[dict[str, object]], words: str
) -> None:
    data = replace(prompt_set(len(columns)), prompts=with_columns(*columns))
    with pytest.raises(DataError, match=words):
        make_source(config(task=keys), data, None)
