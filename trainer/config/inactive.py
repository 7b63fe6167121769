"""Keys that nothing reads in combination with other choices: one row each, and what happens to their values.

`ppo_7b` has a learning rate for its critic. With `algorithm=grpo` there is no critic, and a user who chose that should
not have to take the rate back: the key is reset to its default, and a line says so. A user who set the key by name gets
an error instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from rollout.prompts.datasets import reader_of_suffix
from trainer.config.algorithm import ESTIMATORS, LOSSES, OWN_TRAITS, is_own, loss_traits, traits_of
from trainer.config.field import value_text
from trainer.config.schema import all_keys, shown, with_value
from trainer.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from trainer.config.algorithm import CorrectionConfig, EstimatorTraits
    from trainer.config.schema import RunConfig

BUILTIN_TASK = "builtin:arithmetic"


@dataclass(frozen=True, slots=True)
class Inactive:
    """Keys that nothing reads while `when` holds."""

    keys: Sequence[str]
    when: Callable[[RunConfig], bool]
    why: str
    """Formatted with the configuration `c`."""
    because: Sequence[str]
    """The keys that make them inactive."""
    hint: str = ""
    """By default, to leave the key at its default."""
    is_kept: bool = False
    """A YAML file may well have the keys for runs in which they are read: they are never reset."""


def _traits(c: RunConfig) -> EstimatorTraits:
    """A user's own estimator reads no key of the built-in ones."""
    return OWN_TRAITS if is_own(c.algorithm.advantage_estimator) else traits_of(c.algorithm)


def _reads_level(correction: CorrectionConfig) -> bool:
    return correction.objective != "bypass" or correction.clamp.is_active or correction.mask.is_active


def _is_file(path: str, reader: str) -> bool:
    return reader_of_suffix(path) is not None and reader != "hf"


_NO_FILTER = "task.pass_rate_min=0 and task.pass_rate_max=1 filter nothing"
_PASS_RATES = ("task.pass_rate_min", "task.pass_rate_max")
_ADVANTAGE, _LOSS, _EVAL_PATH = ("algorithm.advantage_estimator",), ("algorithm.loss",), ("task.eval_path",)
_CHOSEN = "algorithm.advantage_estimator={c.algorithm.advantage_estimator}"
_CORRECTION = "algorithm.correction"
_SPLIT_OF_FILE = "is a file, which has no splits"
_NO_BOUND = "no bound is set"
_OF_CRITIC = tuple(key for key in all_keys() if key.startswith("critic."))
_OF_OWN_BACKBONE = ("path", "lr", "weight_decay", "max_grad_norm", "warmup_steps", "updates_per_step", "cpu_offload")
_OF_EVALUATION = ("samples", "temperature", "top_p", "pass_k", "pass_threshold", "timeout_s")

INACTIVE: tuple[Inactive, ...] = (
    Inactive(["model.lora.alpha", "model.lora.target_modules"], lambda c: c.model.lora.rank == 0,
        "model.lora.rank=0 trains all weights", ["model.lora.rank"]),
    # Prompts.
    Inactive(["task.max_operand"], lambda c: BUILTIN_TASK not in {c.task.train_path, *c.task.held_out_paths.values()},
        f"no prompts come from {BUILTIN_TASK}", ["task.train_path", "task.eval_path"]),
    Inactive(["task.pass_rate_cooldown_epochs", "task.pass_threshold"], lambda c: not c.task.filters_pass_rate,
        _NO_FILTER, _PASS_RATES),
    Inactive(["task.pass_rate_column"], lambda c: not c.task.filters_pass_rate and c.task.curriculum == "none",
        f"{_NO_FILTER}, and task.curriculum=none", _PASS_RATES),
    Inactive(["task.pass_rate_column"],
        lambda c: not c.task.filters_pass_rate and c.task.curriculum != "none" and bool(c.task.difficulty_column),
        f"{_NO_FILTER}, and task.curriculum goes by task.difficulty_column",
        [*_PASS_RATES, "task.difficulty_column"]),
    Inactive(["task.curriculum_epochs", "task.difficulty_column"], lambda c: c.task.curriculum == "none",
        "task.curriculum=none", ["task.curriculum"]),
    Inactive(["task.train_split"], lambda c: not c.task.train_path, "task.train_path is empty", ["task.train_path"]),
    Inactive(["task.train_split"], lambda c: _is_file(c.task.train_path, c.task.reader),
        "{c.task.train_path} " + _SPLIT_OF_FILE, ["task.train_path"]),
    Inactive(["task.eval_split"], lambda c: not c.task.eval_path, "task.eval_path is empty", _EVAL_PATH),
    Inactive(["task.eval_split"], lambda c: _is_file(c.task.eval_path, c.task.reader),
        "{c.task.eval_path} " + _SPLIT_OF_FILE, _EVAL_PATH),
    Inactive(["task.difficulty_column", "task.pass_rate_column"], lambda c: c.task.train_path == BUILTIN_TASK,
        f"{BUILTIN_TASK} has no further columns", ["task.train_path"]),
    Inactive(["task.agent_args", "task.agent_timeout_s", "task.agent_max_sequences"], lambda c: not c.task.agent,
        "task.agent is empty: every response is a single turn", ["task.agent"]),
    Inactive(["algorithm.on_failure.agent_error"], lambda c: not c.task.agent,
        "task.agent is empty, so no agent can fail", ["task.agent"]),
    # Advantages. A user's own estimator reads no key of the others, regardless of its traits.
    *(Inactive([f"algorithm.{key}"], lambda c, key=key: key not in _traits(c).keys, f"{_CHOSEN} does not read it",
        _ADVANTAGE)
        for key in dict.fromkeys(key for traits in ESTIMATORS.values() for key in traits.keys)),
    Inactive(["algorithm.overlong_buffer_tokens"], lambda c: _traits(c).uses_parts,
        f"{_CHOSEN} reads the parts of the reward, and shaping changes their total", _ADVANTAGE),
    Inactive(["algorithm.overlong_buffer_tokens"], lambda c: c.algorithm.advantage_estimator == "zero",
        f"{_CHOSEN} reads no reward", _ADVANTAGE),
    Inactive(["algorithm.overlong_penalty"], lambda c: c.algorithm.overlong_buffer_tokens == 0,
        "algorithm.overlong_buffer_tokens=0 turns the penalty off", ["algorithm.overlong_buffer_tokens"]),
    # Functions of the user.
    Inactive(["algorithm.advantage_args"], lambda c: not is_own(c.algorithm.advantage_estimator),
        f"{_CHOSEN} is built in and has keys of its own", _ADVANTAGE),
    Inactive(["algorithm.loss_args"], lambda c: not is_own(c.algorithm.loss),
        "algorithm.loss={c.algorithm.loss} is built in and has keys of its own", _LOSS),
    Inactive(["algorithm.group_filter_args"], lambda c: not c.algorithm.group_filter,
        "algorithm.group_filter is empty", ["algorithm.group_filter"]),
    # The loss.
    *(Inactive([f"algorithm.{key}"], lambda c, key=key: key not in loss_traits(c.algorithm.loss).keys,
        "algorithm.loss={c.algorithm.loss} does not read it", _LOSS)
        for key in dict.fromkeys(key for traits in LOSSES.values() for key in traits.keys)),
    Inactive(["algorithm.loss_norm_tokens"], lambda c: c.algorithm.loss_aggregation != "seq_mean_token_sum_norm",
        "algorithm.loss_aggregation={c.algorithm.loss_aggregation} has no constant divisor",
        ["algorithm.loss_aggregation"]),
    # The critic and the reference.
    Inactive(_OF_CRITIC, lambda c: not c.algorithm.uses_critic, f"{_CHOSEN} has no critic", _ADVANTAGE),
    Inactive([f"critic.{name}" for name in _OF_OWN_BACKBONE],
        lambda c: c.algorithm.uses_critic and c.critic.shared_backbone,
        "critic.shared_backbone=true trains the value head with the policy's optimizer, in the policy's updates",
        ["critic.shared_backbone"]),
    Inactive(["critic.value_coef"], lambda c: c.algorithm.uses_critic and not c.critic.shared_backbone,
        "a critic with its own backbone has its own optimizer", ["critic.shared_backbone"]),
    Inactive(["critic.value_clip"],
        lambda c: c.algorithm.uses_critic and c.critic.updates_per_step == c.learner.num_updates == 1,
        "the first update of a step starts from the values that it is clipped around",
        ["critic.updates_per_step", "learner.updates_per_batch"]),
    Inactive(
        ["algorithm.kl.reference_model", "algorithm.kl.apply_to", "algorithm.kl.estimator",
            "learner.reference_cpu_offload"],
        lambda c: c.algorithm.kl.coef == 0, "algorithm.kl.coef=0 keeps no reference", ["algorithm.kl.coef"]),
    Inactive(["learner.reference_cpu_offload"],
        lambda c: c.algorithm.kl.coef > 0 and c.model.lora.rank > 0 and c.algorithm.kl.reference_model is None,
        "with LoRA the reference is the policy without its adapters", ["model.lora.rank"]),
    # The off-policy correction.
    Inactive([f"{_CORRECTION}.clamp.lower", f"{_CORRECTION}.clamp.upper"],
        lambda c: not loss_traits(c.algorithm.loss).is_weighted,
        "algorithm.loss={c.algorithm.loss} contains no ratio to clamp", _LOSS),
    Inactive([f"{_CORRECTION}.level"],
        lambda c: not _reads_level(c.algorithm.correction),
        f"with {_CORRECTION}.objective=bypass only clamp and mask read it, and neither has a bound",
        [f"{_CORRECTION}.objective", f"{_CORRECTION}.clamp", f"{_CORRECTION}.mask"]),
    Inactive([f"{_CORRECTION}.mask.metric"], lambda c: not c.algorithm.correction.mask.is_active, _NO_BOUND,
        [f"{_CORRECTION}.mask.lower", f"{_CORRECTION}.mask.upper"]),
    Inactive([f"{_CORRECTION}.reject.metric", f"{_CORRECTION}.reject.level"],
        lambda c: not c.algorithm.correction.reject.is_active, _NO_BOUND,
        [f"{_CORRECTION}.reject.lower", f"{_CORRECTION}.reject.upper"]),
    # Engines.
    Inactive(["rollout.min_concurrency"], lambda c: c.rollout.concurrency == "fixed",
        "rollout.concurrency=fixed does not adapt", ["rollout.concurrency"]),
    Inactive(["rollout.repack_below"], lambda c: c.rollout.num_replicas == 1,
        "there is no other engine to move requests to", ["rollout.num_replicas"]),
    Inactive(["rollout.repack_below"], lambda c: c.mode.shares_devices,
        "with mode.name={c.mode.name} all engines leave their devices at the same moment", ["mode.name"]),
    Inactive(["mode.offload"], lambda c: not c.mode.shares_devices,
        "with mode.name={c.mode.name} learner and engines have separate devices", ["mode.name"]),
    # Training, evaluation, and what is written.
    Inactive(["learner.min_lr_ratio"], lambda c: c.learner.lr_schedule == "constant",
        "learner.lr_schedule=constant never lowers the learning rate", ["learner.lr_schedule"]),
    Inactive(["learner.decay_steps"], lambda c: c.learner.lr_schedule != "wsd",
        "learner.lr_schedule={c.learner.lr_schedule} has no last steps of its own", ["learner.lr_schedule"]),
    Inactive(["task.eval_size"], lambda c: not c.task.eval_path, "task.eval_path is empty: nothing is evaluated",
        _EVAL_PATH),
    Inactive([f"trainer.eval_{name}" for name in _OF_EVALUATION], lambda c: not c.evaluates, "nothing is evaluated",
        ["task.eval_path", "trainer.eval_every"]),
    # Colocated mode sets it, whether or not anything is evaluated.
    Inactive(["trainer.eval_blocking"], lambda c: not c.evaluates and not c.mode.shares_devices,
        "nothing is evaluated", ["task.eval_path", "trainer.eval_every"]),
    # Without task.eval_path they are refused (rules.py): something is missing then.
    Inactive(["task.eval_sets"], lambda c: bool(c.task.eval_path) and not c.evaluates, "nothing is evaluated",
        ["task.eval_path", "trainer.eval_every"], hint="set trainer.eval_every, or leave them out: ~task.eval_sets"),
    Inactive(["trainer.eval_blocking"],
        lambda c: c.evaluates and not c.evaluates_while_training and not c.mode.shares_devices,
        "only the last version is evaluated, after training", ["trainer.eval_every"]),
    Inactive(["trainer.eval_top_p"], lambda c: c.evaluates and c.trainer.eval_temperature == 0,
        "greedy responses (trainer.eval_temperature=0) take the likeliest token", ["trainer.eval_temperature"]),
    Inactive(["checkpoint.keep_every", "checkpoint.asynchronous"], lambda c: c.checkpoint.every_steps == 0,
        "checkpoint.every_steps=0 saves at the end only", ["checkpoint.every_steps"]),
    Inactive([f"telemetry.wandb_{name}" for name in ("project", "entity", "group", "tags")],
        lambda c: not c.telemetry.wandb, "telemetry.wandb is false", ["telemetry.wandb"]),
    Inactive(["ray.placement_timeout_s"], lambda c: c.ray.address == "local",
        "ray.address=local starts a private cluster", ["ray.address"]),
    Inactive(["ray.num_cpus", "ray.object_store_gib"], lambda c: c.ray.address not in {"", "local"},
        "ray.address={c.ray.address} joins a cluster that is already set up", ["ray.address"], is_kept=True),
)  # fmt: skip
"""A row that reads a key comes after the rows that may reset that key, so one pass is enough."""


def inactive_keys(config: RunConfig) -> set[str]:
    """Keys that have another value than their default, and that nothing reads."""
    rows = [row for row in INACTIVE if not row.is_kept and row.when(config)]
    return {key for row in rows for key in row.keys if attrgetter(key)(config) != all_keys()[key].default}


def reset_inactive(
    config: RunConfig, *, chosen: Collection[str], written: Collection[str]
) -> tuple[RunConfig, str, list[Problem]]:
    """`config` with every inactive key at its default; a note with what was reset; what is refused instead.

    Args:
        chosen: keys and sections that the user chose; those keys are refused if they are inactive.
        written: keys of the command line, which are refused with their default value too.
    """
    reset: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for row in filter(lambda row: row.when(config), INACTIVE):
        why = row.why.format(c=config)
        for key in row.keys:
            value, default = attrgetter(key)(config), all_keys()[key].default
            if value == default or row.is_kept:
                is_refused, hint = key in written, "leave it out"
            else:
                is_refused, hint = _is_chosen(key, chosen), row.hint or f"leave it at {value_text(default)}"
                if not is_refused:
                    reset.setdefault(why, []).append(f"{key}={shown(key, value)}")
                    config = with_value(config, key, default)
            if is_refused:
                message, related = f"has no effect because {why}", tuple(row.because)
                problems.append(Problem(key=key, value=shown(key, value), message=message, hint=hint, related=related))
    note = "".join(
        f"reset to default (unused with these settings): {', '.join(keys)} ({why})\n" for why, keys in reset.items()
    )
    return config, note, problems


def _is_chosen(key: str, chosen: Collection[str]) -> bool:
    """Whether it is in `chosen`, or a section around it is, or an entry of it (`task.agent_args.tools`)."""
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in chosen)
