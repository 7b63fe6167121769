"""Combinations of values around evaluation and its sets. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainer.config.conflicts import NO_EFFECT, Ineffective, conflict, ineffective
from trainer.config.keys import value_text
from trainer.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import EvalSetConfig, RunConfig

MIN_TEMPERATURE = 0.01
"""vLLM raises what is below, and not 0, to it; the learner would go on with the other."""
_EVALUATION_KEYS = (
    "eval_samples", "eval_temperature", "eval_top_p", "eval_pass_k", "eval_pass_reward", "eval_blocking",
    "eval_timeout_s",
)  # fmt: skip
RESERVED_NAMES = ("accuracy", "num_prompts", "pass_at", "reward")
"""Of evaluation sets: their metrics would have the names of others, as `eval/accuracy/...` is of a reward."""


def evaluation_problems(config: RunConfig) -> Iterator[Problem]:
    """Samples and k that do not go together; a deadline below that of one answer; keys that nothing reads because
    nothing is evaluated."""
    trainer = config.trainer
    beside = trainer.eval_every > 0 or trainer.eval_at_start
    if not config.task.eval_path or not (beside or trainer.eval_at_end):
        why, also = "nothing is evaluated", ("task.eval_path", "trainer.eval_every")
        for name in _EVALUATION_KEYS:
            if name == "eval_blocking" and config.mode.shares_devices:
                continue  # that mode sets it, whether or not anything is evaluated
            yield from ineffective(config, f"trainer.{name}", why, *also)
        yield from _unread_sets(config)
        return
    yield from _set_problems(config)
    if not beside and not config.mode.shares_devices:
        why = "only the last version is evaluated, when training is over"
        yield from ineffective(config, "trainer.eval_blocking", why, "trainer.eval_every")
    if 0 < trainer.eval_temperature < MIN_TEMPERATURE:
        allowed = f"must be 0 or at least {MIN_TEMPERATURE}: vLLM would sample at {MIN_TEMPERATURE}"
        yield conflict(config, "trainer.eval_temperature", allowed, "use 0 for greedy answers")
    if trainer.eval_samples > 1 and trainer.eval_temperature == 0:
        allowed = "must be 1 with trainer.eval_temperature=0: greedy answers to one prompt are all the same"
        do = "use trainer.eval_temperature=1.0, or one sample"
        yield conflict(config, "trainer.eval_samples", allowed, do, "trainer.eval_temperature")
    if trainer.eval_temperature == 0:
        why = "greedy answers (trainer.eval_temperature=0) take the likeliest token"
        yield from ineffective(config, "trainer.eval_top_p", why, "trainer.eval_temperature")
    if trainer.eval_pass_k is not None and trainer.eval_pass_k > trainer.eval_samples:
        allowed = f"must be at most trainer.eval_samples={trainer.eval_samples}: there is no estimate beyond it"
        yield conflict(config, "trainer.eval_pass_k", allowed, "raise trainer.eval_samples", "trainer.eval_samples")
    longest = "task.agent_timeout_s" if config.task.agent else "rollout.request_timeout_s"
    limit_s = config.task.agent_timeout_s if config.task.agent else config.rollout.request_timeout_s
    if trainer.eval_timeout_s < limit_s:
        allowed = f"must be at least {longest}={limit_s:g}: a single answer may take that long"
        yield conflict(config, "trainer.eval_timeout_s", allowed, "raise it, or lower that", longest)


def _unread_sets(config: RunConfig) -> Iterator[Problem]:
    """Further sets where nothing is evaluated, or where there is none that they are beside."""
    names = ", ".join(config.task.eval_sets)
    if not names:
        return
    key, also = "task.eval_sets", ("task.eval_path", "trainer.eval_every")
    if config.task.eval_path:
        allowed, do = f"{NO_EFFECT}nothing is evaluated", "set trainer.eval_every, or leave them out: ~task.eval_sets"
        yield Ineffective(key=key, got=names, allowed=allowed, do=do, also=also)
        return
    allowed = "stand beside task.eval_path, which is empty"
    do = "name one of them there (eval/accuracy and trainer.stop_at_accuracy are about it), or ~task.eval_sets"
    yield Problem(key=key, got=names, allowed=allowed, do=do, also=also)


def _set_problems(config: RunConfig) -> Iterator[Problem]:
    for name, one in config.task.eval_sets.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name in RESERVED_NAMES:
            allowed = f"a name is of letters, digits and . _ -, and none of {', '.join(RESERVED_NAMES)}"
            yield Problem(key="task.eval_sets", got=name, allowed=allowed, do="it is part of eval/NAME/accuracy")
        if not one.path:
            do = "set it, or leave the set out"
            yield Problem(key=f"task.eval_sets.{name}.path", got="", allowed="must name held-out prompts", do=do)
        yield from _sample_problems(config, f"task.eval_sets.{name}.samples", one)


def _sample_problems(config: RunConfig, key: str, one: EvalSetConfig) -> Iterator[Problem]:
    """What `trainer.eval_samples` is checked for, of a set with a number of its own."""
    trainer = config.trainer
    if one.samples is None:
        return
    if one.samples > 1 and trainer.eval_temperature == 0:
        allowed = "must be 1 with trainer.eval_temperature=0: greedy answers to one prompt are all the same"
        do = "use trainer.eval_temperature=1.0, or one sample"
        yield Problem(key=key, got=value_text(one.samples), allowed=allowed, do=do, also=("trainer.eval_temperature",))
    if trainer.eval_pass_k is not None and one.samples < trainer.eval_pass_k:
        allowed = f"must be at least trainer.eval_pass_k={trainer.eval_pass_k}: there is no estimate beyond it"
        do = "raise it, or use trainer.eval_pass_k=null: each set's own number"
        yield Problem(key=key, got=value_text(one.samples), allowed=allowed, do=do, also=("trainer.eval_pass_k",))
