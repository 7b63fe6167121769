"""Between plain containers, as YAML gives them, and the sealed `RunConfig`; what is wrong with them in words."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from typing import Any, cast, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from trainer.config.field import Key, beside_words, keys_of, type_text, value_text, without_null, words_of
from trainer.config.presets import groups, packaged_configs
from trainer.config.schema import RunConfig, all_keys
from trainer.errors import Problem

_Parts = Sequence[int | str]

RENAMED: Mapping[str, str] = {
    "algorithm.advantage": "algorithm.advantage_estimator",
    "algorithm.aggregation": "algorithm.loss_aggregation",
    "algorithm.aggregation_norm_tokens": "algorithm.loss_norm_tokens",
    "algorithm.clip_dual": "algorithm.dual_clip",
    "algorithm.clip_high": "algorithm.clip_ratio_high",
    "algorithm.clip_low": "algorithm.clip_ratio_low",
    "algorithm.filter_zero_variance": "algorithm.dynamic_sampling",
    "algorithm.kl.path": "algorithm.kl.reference_model",
    "algorithm.kl.placement": "algorithm.kl.apply_to",
    "algorithm.max_refills_per_step": "algorithm.max_filtered_batches_per_step",
    "learner.logprob_chunk_tokens": "learner.logprob_chunk_size",
    "learner.min_lr_frac": "learner.min_lr_ratio",
    "rollout.report_load": "rollout.engine_stats",
    "rollout.seed_requests": "rollout.per_request_seed",
    "rollout.silence_timeout_s": "rollout.heartbeat_timeout_s",
    "rollout.stream_tokens": "rollout.stream_interval",
    "task.pass_rate_retry_epochs": "task.pass_rate_cooldown_epochs",
    "task.pass_reward": "task.pass_threshold",
    "telemetry.trajectories_gib": "telemetry.max_trajectories_gib",
    "trainer.eval_pass_reward": "trainer.eval_pass_threshold",
}
"""Earlier name of a key -> its name now. The command line and YAML files of users must use the new one; the
configurations of earlier runs are read through this map."""

_NAMES_OF_OTHERS = {
    "trainer.total_steps": "max_steps max_num_steps num_steps num_rollout iterations num_epochs num_train_epochs "
    "total_epochs epochs",
    "trainer.groups_per_step": "batch_size train_batch_size rollout_batch_size",
    "trainer.eval_every": "eval_steps test_freq val_period eval_interval",
    "rollout.group_size": "num_generations n_samples_per_prompt n_samples",
    "rollout.max_response_tokens": "max_new_tokens max_tokens max_completion_length max_response_length "
    "generate_max_len max_length",
    "task.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "rollout.tensor_parallel_size": "tensor_model_parallel_size tp tp_size",
    "learner.lr": "learning_rate actor_learning_rate",
    "learner.optimizer": "optim optimizer_type optimizer_name",
    "learner.lr_schedule": "lr_scheduler_type lr_scheduler lr_decay_style",
    "learner.warmup_steps": "lr_warmup_steps warmup",
    "learner.max_grad_norm": "grad_clip clip_grad gradient_clipping",
    "learner.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "learner.fsdp_size": "dp_shard data_parallel_shard_degree",
    "learner.context_parallel_size": "ulysses_sequence_parallel_size sequence_parallel_size cp cp_size "
    "context_parallel_degree ring_attn_size",
    "learner.tensor_parallel_size": "tensor_parallel_degree",
    "learner.num_ranks": "num_gpus n_gpus gpus n_gpus_per_node gpus_per_node",
    "algorithm.kl.coef": "beta init_kl_coef kl_loss_coef kl_ctl",
    "algorithm.clip_ratio_low": "epsilon eps_clip",
    "algorithm.clip_ratio_high": "epsilon_high eps_clip_high",
    "checkpoint.every_steps": "save_steps save_freq save_interval save_period",
    "checkpoint.resume": "resume_from_checkpoint resume_from_path load_checkpoint",
    "run_dir": "output_dir default_local_dir checkpoint_dir ckpt_path save_path",
    "model.path": "model_name model_name_or_path model_path hf_checkpoint pretrain",
    "task.train_path": "dataset dataset_name train_data prompt_data",
    "task.reward.name": "reward_funcs reward_fn reward_function",
}
OTHER_NAMES = {name: key for key, names in _NAMES_OF_OTHERS.items() for name in names.split()}
"""The last part of a key of another system -> the key with the same purpose here; docs/coming_from.md has more."""


def to_run_config(data: Mapping[str, object]) -> tuple[RunConfig, list[Problem]]:
    """Check `data` against the schema. Keys that are absent, or wrong, take their default."""
    rest, problems = deepcopy(dict(data)), list[Problem]()
    while True:
        try:
            return _adapter().validate_python(rest), problems
        except ValidationError as error:
            for one in error.errors(include_url=False, include_context=False):
                parts, key = _key_at(one["loc"])
                section, name = _value_at(rest, parts[:-1]), parts[-1]
                if name not in section:
                    continue  # an alternative of a type that was refused already
                value = section.pop(name)
                if key is None:
                    problems += _unknown(parts, value)
                elif key.is_section:
                    section[name] = {}
                    problems += [] if value is None else [_no_section(key, value)]
                else:
                    hint = f"default {value_text(key.default)}: {key.doc}"
                    message = _refusal(key, value, one["loc"][len(parts) :])
                    problems.append(Problem(key=key.path, value=value_text(value), message=message, hint=hint))


def read_stored(data: Mapping[str, object]) -> tuple[RunConfig, list[Problem]]:
    """As `to_run_config`, for the config.yaml of an earlier run."""
    return to_run_config(with_current_names(data))


def is_stored(data: Mapping[object, object]) -> bool:
    """Whether a YAML file is the config.yaml of a run: no `defaults`, and the sections that each of them has."""
    return "defaults" not in data and data.keys() >= {"run_dir", "algorithm", "learner", "rollout", "checkpoint"}


def with_current_names(data: Mapping[str, object]) -> dict[str, Any]:
    """The configuration of an earlier run with its keys renamed to today's names."""
    renamed = deepcopy(dict(data))
    for old, new in RENAMED.items():
        # Every renamed key is in the section where it was.
        *sections, name = old.split(".")
        section = _value_at(renamed, sections)
        if isinstance(section, dict) and name in section:
            section[new.rpartition(".")[2]] = cast("dict[str, Any]", section).pop(name)
    return renamed


def dump_yaml(config: RunConfig) -> str:
    """Every key with its value, in the order of the schema. Loading the text gives the same configuration."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=120)


def suggestion(path: str) -> str:
    """What to write for a key that does not exist; empty if nothing is close."""
    if path in RENAMED:
        return f"renamed to {RENAMED[path]}"
    known, (section, _, leaf) = list(all_keys()), path.rpartition(".")
    found = [key for key in known if key.replace(".", "_") == path.replace(".", "_")][:1]
    if not found:
        found = [key for key in known if key.rpartition(".")[2] == leaf and not all_keys()[key].is_section]
    if len(found) not in (1, 2):
        found = [OTHER_NAMES[leaf]] if leaf in OTHER_NAMES else []
    # Keys of the same section first, then those of others.
    for candidates in ([key for key in known if key.rpartition(".")[0] == section], known):
        by_leaf = {key.rpartition(".")[2]: key for key in reversed(candidates)}
        found = found or [by_leaf[word] for word in difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.7)]
    return f"did you mean {' or '.join(found)}?" if found else ""


def close_word(value: str, words: Sequence[str]) -> str:
    """The word that `value` is a slip of; empty if it is none. Two of three letters are no likeness: gpu is not npu."""
    return next(iter(difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.7)), "")


@cache
def _adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


def _key_at(parts: _Parts, section: type = RunConfig, depth: int = 0) -> tuple[_Parts, Key | None]:
    """The key that an error at `parts`, which may be inside its value, is about, and where it is; None if there is no
    such key. Parts, since the name of an entry of a map may contain dots."""
    prefix = "".join(f"{part}." for part in parts[:depth])
    key = next((one for one in keys_of(section, prefix) if one.path == f"{prefix}{parts[depth]}"), None)
    depth += 1
    if key is None or depth == len(parts):
        return parts[:depth], key
    if key.is_section:
        return _key_at(parts, key.hint, depth)
    if (entries := key.section_of_entries) is None:
        return parts[:depth], key
    if depth + 1 == len(parts):
        return parts, Key(".".join(map(str, parts)), entries, None, key.doc, "")
    return _key_at(parts, entries, depth + 1)


def _value_at(data: Any, parts: _Parts) -> Any:
    """None if there is no such value."""
    for part in parts:
        data = cast("dict[int | str, Any]", data).get(part) if isinstance(data, dict) else None
    return data


def _no_section(key: Key, value: object) -> Problem:
    names = [one.path for one in keys_of(key.hint)]
    is_option = isinstance(value, str) and value in groups([packaged_configs()]).get(key.path, [])
    choose = f"choose the group with {key.path}={value} or in `defaults`, or " if is_option else ""
    message = f"expected a section with the keys {', '.join(names)}"
    hint = f"{choose}set its keys one by one: {key.path}.{names[0]}=..."
    return Problem(key=key.path, value=value_text(value), message=message, hint=hint)


def _unknown(parts: _Parts, value: object) -> Iterator[Problem]:
    """A section whose name is close to none is reported by the keys in it."""
    *sections, name = map(str, parts)
    section, path = ".".join(sections), ".".join([*sections, name])
    holder = _key_at(parts[:-1])[1] if sections else None
    siblings = [one.path for one in keys_of(RunConfig if holder is None else holder.hint)]
    keys = f"keys of {section or 'the top level'}: {', '.join(siblings)}"
    if not section:
        keys += "; docs/coming_from.md has the names of other systems"
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if section and section not in all_keys() and close:  # an entry of a map: its keys are like those of no section
        inner, hint = {path: value}, f"did you mean {section}.{close[0]}?"
    else:
        inner, hint = {path: value} if suggestion(path) else dict(_leaves(path, value)), ""
    for leaf, given in inner.items():
        text = "{...}" if isinstance(given, Mapping) else value_text(given)
        yield Problem(key=leaf, value=text, message="unknown key", hint=hint or suggestion(leaf) or keys)


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in cast("Mapping[object, object]", value).items():
        yield from _leaves(f"{path}.{name}", inner)


def _refusal(key: Key, value: Any, inside: _Parts) -> str:
    """Why `key` cannot have `value`; `inside` leads from the key to the wrong entry of a map or list."""
    if key.entry is not None and inside:
        return f"entry {inside[0]} {_wrong_type(key.entry, value[inside[0]])}"
    other = beside_words(key.hint)
    if other in (None, str) and (words := words_of(key.hint)):
        return _no_word(key, list(map(str, words)), value)
    hint = without_null(key.hint) if other is None else other
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is not None and (hint is float or (hint is int and float(number).is_integer())):
        instead = "".join(f" or {word}" for word in words_of(key.hint))
        return f"must be {key.bounds}{instead}" if math.isfinite(number) else "must be a finite number"
    is_none = type(None) in get_args(key.hint) and str(value).lower() in {"none", "nil", "~", ""}
    return _wrong_type(without_null(key.hint), value) + ("; for no value write null" if is_none else "")


def _wrong_type(hint: Any, value: object) -> str:
    how = ""
    if get_origin(hint) is list:
        how = "; put it in brackets: [...]"
    elif hint is str and isinstance(value, int | float):
        how = "; put it in quotes"
    elif hint is str and value is None:
        how = '; for an empty text write nothing after the =, in YAML ""'
    match value:
        case bool():
            kind = f"the boolean {value_text(value)}"
        case str():
            kind = f'the text "{value}"'
        case int() | float():
            kind = f"the number {value_text(value)}"
        case list():
            kind = "a list"
        case None:
            kind = "null"
        case _:
            kind = "a section" if isinstance(value, Mapping) else type(value).__name__
    return f"expected {type_text(hint)}, got {kind}{how}"


def _no_word(key: Key, words: Sequence[str], value: object) -> str:
    if isinstance(value, bool):
        value = "on" if value else "off"
    text, takes_path = f"must be one of {', '.join(words)}", str in get_args(key.hint)
    custom = "or the dotted path of your own function (package.module.function)"
    if takes_path and isinstance(value, str) and "." in value:
        return f"{text}, {custom}, which joins names by dots"
    close = close_word(str(value), words)
    return text + (f"; did you mean {close}?" if close else "") + (f"; {custom}" if takes_path else "")
