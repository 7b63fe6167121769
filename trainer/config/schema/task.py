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
    timeout_s: float = key(10.0, "Wall-clock limit of one reward call; past it the process is killed.", gt=0)
    num_processes: int = key(2, "Killable reward processes per rollout worker.", ge=1)


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
    train_split: str = key("train", "Split of a Hugging Face data set for training.")
    eval_split: str = key("test", "Split of a Hugging Face data set for evaluation.")
    prompt_column: str = key("prompt", "Column with the prompt: a string, or a list of chat messages.")
    answer_column: str = key("answer", "Column with the ground truth; may be missing if the reward needs none.")
    apply_chat_template: bool = key(False, "Wrap string prompts as one user message in the tokenizer's chat template.")
    system_prompt: str = key("", "System message put before every prompt when a chat template is applied.")
    max_prompt_tokens: int = key(512, "Longest prompt, in tokens.", ge=1)
    overlong_prompts: Literal["error", "filter"] = key(
        "filter", "What to do with prompts over `max_prompt_tokens`: refuse to start, or drop, counted and logged."
    )
    shuffle: bool = key(True, "Shuffle training prompts with the run's seed, anew each epoch.")
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
    reward: RewardConfig = key(factory=RewardConfig, doc="How answers are judged.")
