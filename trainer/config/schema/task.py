"""`task`: where prompts come from and how answers are judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    name: str = key(
        "arithmetic",
        "A registered reward (`arithmetic`, `math`; `zero` where an environment rewards the turns), or your own "
        "function as `path/to/file.py:name` or `package.module.name`.",
        is_path=True,
    )
    column: str = key(
        "",
        "Column that names the reward of each row, as `name` does, for data sets of several kinds of tasks. Where it "
        "is null, empty or not there, `name` holds; held-out data may have no such column at all.",
    )
    timeout_s: float = key(10.0, "Wall-clock limit of one reward call; past it the process is killed.", gt=0)
    num_processes: int = key(2, "Killable reward processes per rollout worker.", ge=1)
    max_concurrency: int = key(
        32, "Calls of an `async def` reward at once, per rollout worker; they share one process.", ge=1
    )
    queue_timeout_s: float = key(
        600.0,
        "Longest wait of an answer for a free reward process, or for its turn to call an `async def` reward; past it, "
        "its reward has failed.",
        gt=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetConfig:
    path: str = key("", "Held-out prompts, as in `task.eval_path`.", is_path=True)
    split: str = key("test", "Split of a Hugging Face data set.")
    size: int = key(0, "Prompts per evaluation; 0 means all.", ge=0)
    samples: int | None = key(None, "Answers per prompt; null is `trainer.eval_samples`.", ge=1)
    prompt_column: str = key("", "Column with the prompt; empty is `task.prompt_column`.")
    answer_column: str = key("", "Column with the ground truth; empty is `task.answer_column`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    name: str = key("arithmetic", "Shown in logs and metrics.")
    reader: Literal["auto", "arithmetic", "jsonl", "parquet", "hf"] = key(
        "auto", "How `train_path` is read; `auto` goes by its suffix, else a Hugging Face data set."
    )
    train_path: str = key(
        "builtin:arithmetic",
        "Training prompts: a file, a directory, a hub name, or `builtin:arithmetic`.",
        is_path=True,
    )
    eval_path: str = key("builtin:arithmetic", "Held-out prompts, likewise; empty turns evaluation off.", is_path=True)
    eval_sets: dict[str, EvalSetConfig] = key(
        factory=dict,
        doc="Further held-out prompts beside `eval_path`, by name: each has its own `eval/NAME/accuracy`. Those of "
        "`eval_path` remain the ones that `eval/accuracy` and `trainer.stop_at_accuracy` are about.",
    )
    train_split: str = key("train", "Split of a Hugging Face data set for training.")
    eval_split: str = key("test", "Split of a Hugging Face data set for evaluation.")
    prompt_column: str = key("prompt", "Column with the prompt: a string, or a list of chat messages.")
    answer_column: str = key("answer", "Column with the ground truth; may be missing if the reward needs none.")
    apply_chat_template: bool = key(False, "Wrap string prompts as one user message in the tokenizer's chat template.")
    chat_template_kwargs: dict[str, Any] = key(
        factory=dict,
        doc="Further arguments of the chat template, such as `{enable_thinking: false}`; the template must read each.",
    )
    system_prompt: str = key("", "System message put before every prompt when a chat template is applied.")
    max_prompt_tokens: int = key(512, "Longest prompt, in tokens.", ge=1)
    overlong_prompts: Literal["error", "filter"] = key(
        "filter", "What to do with prompts over `max_prompt_tokens`: refuse to start, or drop, counted and logged."
    )
    dedup: bool = key(
        True,
        "Of rows with the same prompt and answer (and the same reward, with `reward.column`), whatever their other "
        "columns, only the first stays; the others are counted and logged. Training and held-out prompts alike.",
    )
    shuffle: bool = key(True, "Shuffle training prompts with the run's seed, anew each epoch.")
    curriculum: Literal["none", "easy_to_hard"] = key(
        "none", "`easy_to_hard`: the first `curriculum_epochs` epochs go from easy to hard prompts."
    )
    curriculum_epochs: int = key(1, "Epochs that go from easy to hard; later ones are in the usual order.", ge=1)
    difficulty_column: str = key(
        "", "Column with the difficulty for the curriculum, larger is harder; empty goes by `pass_rate_column`."
    )
    pass_rate_min: float = key(
        0.0, "Prompts that the policy solves more rarely than this rest; above 0, never solved ones do.", ge=0, le=1
    )
    pass_rate_max: float = key(
        1.0, "Prompts that the policy solves more often than this rest; below 1, always solved ones do.", ge=0, le=1
    )
    pass_rate_retry_epochs: int = key(
        2, "A prompt that rests is passed over so many times, an epoch each, and then tried again.", ge=1
    )
    pass_rate_column: str = key(
        "",
        "Column with a pass rate of each prompt (0 to 1), measured before the run: counts until a group of it came "
        "back. Null is not known.",
    )
    pass_reward: float = key(1.0, "Reward from which a training answer passes.")
    eval_size: int = key(256, "Prompts per evaluation; 0 means all held-out prompts.", ge=0)
    max_operand: int = key(49, "builtin:arithmetic only: largest operand of the additions.", ge=9)
    agent: str = key(
        "",
        "How an answer comes about: empty is a single turn, else the dotted path (`package.module.name`) of a factory "
        "of agent loops, for several turns, tools and environments. Evaluation uses it too.",
    )
    agent_args: dict[str, Any] = key(factory=dict, doc="Keyword arguments of the factory in `task.agent`.")
    agent_timeout_s: float = key(
        600.0, "Longest time that one trajectory of `task.agent` may take, its environment included.", gt=0
    )
    agent_max_sequences: int = key(
        1,
        "Token sequences that one trajectory of `task.agent` may consist of: more than one if it rewrites its history, "
        "or asks on the side. Each may be as long as an answer.",
        ge=1,
    )
    reward: RewardConfig = key(factory=RewardConfig, doc="How answers are judged.")

    @property
    def held_out_paths(self) -> dict[str, str]:
        """Key -> path of every held-out set."""
        return {"task.eval_path": self.eval_path} | {
            f"task.eval_sets.{name}.path": one.path for name, one in self.eval_sets.items()
        }

    @property
    def filters_pass_rate(self) -> bool:
        return self.pass_rate_min > 0 or self.pass_rate_max < 1
