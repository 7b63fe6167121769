"""From a command line to the checked configuration.

Hydra composes the YAML files with the options of groups, once. It cannot compose frozen nested dataclasses and stops at
the first error, so keys are then set one by one, and the schema checks the result.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_origin

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainer.config.cli import CommandLine, parse
from trainer.config.inactive import inactive_keys, reset_inactive
from trainer.config.plain import close_word, is_stored, suggestion, to_run_config, with_current_names
from trainer.config.presets import PACKAGE, config_names, groups, search_folders
from trainer.config.rules import check_combinations
from trainer.config.schema import OTHER_WORDS, RunConfig, all_keys, find_key, with_value
from trainer.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from importlib.resources.abc import Traversable

    Check = Callable[[RunConfig], Iterable[Problem]]

_OVERRIDE = re.compile(r"(?P<prefix>\+\+|\+|~)?(?P<key>[^=+~\s][^=\s]*)(?:=(?P<value>.*))?", re.DOTALL)
_TEXTS_WITH_LINES = ("rollout.stop", "task.system_prompt")
_LINE_ESCAPE = re.compile(r"(?<!\\)\\[nrt](?![a-z])")
"""Such as \\n at the end of a text, and not \\nabla or \\text."""
_CANNOT = (HydraException, OmegaConfBaseException, yaml.YAMLError)


class _Override(NamedTuple):
    """One word of the command line that sets, adds (`+`, `++`) or deletes (`~`) a key or an option of a group."""

    text: str
    prefix: str
    key: str
    value: str | None


def load_config(argv: Sequence[str], *, check: Check = lambda _config: ()) -> RunConfig:
    """The configuration that a command line asks for, complete and checked.

    Raises `ConfigurationError` with every problem found: unknown keys, wrong types, values out of range, combinations
    that cannot work, and what `check` finds. Starts and creates nothing.
    """
    config, problems = resolve(parse(argv), check=check)
    if problems:
        raise ConfigurationError(problems)
    return config


def resolve(
    line: CommandLine, *, note: Callable[[str], object] | None = None, check: Check = lambda _config: ()
) -> tuple[RunConfig, list[Problem]]:
    """The sealed configuration and what is wrong with what it asks for.

    Args:
        check: finds further problems, to be reported with the others: those of files, for one.
        note: called with whole lines about keys that were reset to their defaults, and where defaults come from.

    Raises `ConfigurationError` if there is no configuration: a key, a type or an override is wrong.
    """
    data, files, problems = _compose(line)
    config, misfits = to_run_config(data)
    if line.nodes is not None and config.ray.address == "local":
        # Given nodes are a cluster that is joined: the devices of this host do not matter.
        config = with_value(config, "ray.address", "auto")
    config, notes, unread = reset_inactive(config, chosen=_chosen(line, config), written=_written(line, config, files))
    refused = {problem.key for problem in [*problems, *misfits]}
    # A refused key has its default now: what follows from that default alone is not the user's problem.
    consequences = [
        problem
        for problem in [*unread, *check_combinations(config), *check(config)]
        if refused.isdisjoint({problem.key, *problem.related})
    ]
    if problems or misfits:
        raise ConfigurationError([*problems, *misfits, *consequences])
    notes = _missing_defaults(line) + ("" if consequences else notes)
    if note is not None and notes:
        note(notes)
    return config, consequences


# What the command line, the named file and the other files set


def _overrides(line: CommandLine) -> list[_Override]:
    """The words that have the form of an override."""
    found = [(text, _OVERRIDE.fullmatch(text)) for text in line.overrides]
    return [_Override(text, one["prefix"] or "", one["key"], one["value"]) for text, one in found if one is not None]


def _chosen(line: CommandLine, config: RunConfig) -> set[str]:
    """Keys and sections that are the user's own choice although nothing reads them: those that the command line sets,
    and those that the file of `--config-name` sets where nothing reads them without the command line either."""
    inactive = inactive_keys(config)
    if not inactive:
        return set()
    folders = search_folders(line.config_dir)
    named = {_declared(one.key) for one in _overrides(line)} - {*groups(folders)}
    of_file = set(map(_declared, _leaves(_raw_file(line.config_name, folders))))
    if of_file & inactive:
        with contextlib.suppress(ConfigurationError):  # without the command line there may be no configuration
            data, _, _ = _compose(replace(line, overrides=()))
            of_file &= inactive_keys(to_run_config(data)[0])
    return named | of_file


def _declared(path: str) -> str:
    """The key that the schema declares: the map, where `path` is an entry of one."""
    parts = path.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((one for one in prefixes if (key := all_keys().get(one)) and get_origin(key.hint) is dict), path)


def _leaves(data: Mapping[object, object], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        path = f"{prefix}{name}"
        key = all_keys().get(path)
        if isinstance(value, dict) and key is not None and key.is_section:
            yield from _leaves(cast("dict[object, object]", value), f"{path}.")
        else:
            yield path


def _written(line: CommandLine, config: RunConfig, files: DictConfig) -> set[str]:
    """Keys that only the command line asks for. Not among them are a default that takes back what a YAML file sets, and
    one that turns something off (0, false, null, empty): where nothing reads the key, it is off."""

    def is_wish(key: str) -> bool:
        default = all_keys()[key].default
        below = OmegaConf.select(files, key, default=default, throw_on_resolution_failure=False)
        return attrgetter(key)(config) != default or (bool(default) and below == default)

    known = {one.key for one in _overrides(line) if one.key in all_keys() and not all_keys()[one.key].is_section}
    return set(filter(is_wish, known))


def _missing_defaults(line: CommandLine) -> str:
    """A note on a file that builds on nothing, unless it is the config.yaml of a run."""
    data = _raw_file(line.config_name, search_folders(line.config_dir))
    if data.get("defaults") or is_stored(data):
        return ""
    return f"{line.config_name}.yaml has no defaults: every other key has the schema's default\n"


def _raw_file(name: str, folders: Sequence[Traversable]) -> dict[object, object]:
    """What the file of a configuration itself contains; empty where it cannot be read, and Hydra reports why."""
    file = next(entry for folder in folders if (entry := folder / f"{name}.yaml").is_file())
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    return cast("dict[object, object]", data) if isinstance(data, dict) else {}


# Composition


def _compose(line: CommandLine) -> tuple[Mapping[str, object], DictConfig, list[Problem]]:
    """The YAML files and overrides as plain containers over the defaults; the files with the options of groups, without
    keys of the command line; and what is wrong with overrides, which are left out."""
    folders = search_folders(line.config_dir)
    known = {name for folder in folders for name in config_names(folder)}
    if line.config_name not in known:
        raise ConfigurationError([_no_such_config(line, sorted(known))])
    options, raw = groups(folders), _raw_file(line.config_name, folders)
    found = {text: _override_problem(text, line, raw, options) for text in line.overrides}
    problems = [problem for problem in found.values() if problem is not None]
    usable = [one for one in _overrides(line) if found[one.text] is None]
    try:
        selected = tuple(one.text for one in usable if one.key in options)
        files = (_packaged if line.config_dir is None else _files)(line.config_name, selected, line.config_dir)
        if is_stored(raw):
            stored = cast("dict[str, object]", OmegaConf.to_container(files))
            files = OmegaConf.create(with_current_names(stored))
        composed = files.copy()
        for one in usable:
            if one.key not in options:
                _apply(one, composed)
        # Defaults below, so that `${learner.lr}` resolves whether or not a YAML file mentions it.
        merged = OmegaConf.merge(_defaults(), composed)
        data = OmegaConf.to_container(merged, resolve=True)
    except _CANNOT as error:
        raise ConfigurationError([*problems, _hydra_problem(line, error)]) from error
    return cast("Mapping[str, object]", data), files, problems


def _files(name: str, selected: Sequence[str], config_dir: Path | None) -> DictConfig:
    """What Hydra composes, with the options of groups. A folder of the user wins over the package."""
    GlobalHydra.instance().clear()
    if config_dir is None:
        with initialize_config_module(config_module=PACKAGE, version_base="1.3"):
            return compose(config_name=name, overrides=[*selected])
    with initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
        return compose(config_name=name, overrides=[*selected, f"hydra.searchpath=[pkg://{PACKAGE}]"])


_packaged = functools.cache(_files)
"""The files of the package do not change while it runs. Nobody changes the result."""


@functools.cache
def _defaults() -> DictConfig:
    return OmegaConf.create(asdict(RunConfig()))


def _apply(override: _Override, config: DictConfig) -> None:
    """Set or delete a key, whether or not the YAML files mention it: the schema decides which keys exist, for all at
    once."""
    value: Any = _parsed(override).value()
    with open_dict(config):
        if override.prefix != "~":
            OmegaConf.update(config, override.key, value, merge=True, force_add=True)
            return
        section, _, name = override.key.rpartition(".")
        there = OmegaConf.select(config, override.key, throw_on_missing=False)
        if there is None:
            raise HydraException(f"Could not delete from config. '{override.key}' does not exist.")
        if value is not None and value != there:
            text = f"The value of '{override.key}' is {there} and not {value}."
            raise HydraException(f"Could not delete from config. {text}")
        del (OmegaConf.select(config, section) if section else config)[name]


def _parsed(override: _Override) -> Any:
    """By Hydra's grammar. Text is quoted, so that paths with brackets or commas need no second layer of quotes."""
    text, prefix, name, value = override
    if prefix != "~" and value is not None:
        key, section = find_key(name), all_keys().get(name.rpartition(".")[0])
        is_text = key.is_text if key is not None else section is not None and section.hint == dict[str, str]
        text = f"++{name}={_quoted(value) if is_text else value}"
    return OverridesParser.create().parse_override(text)


def _quoted(value: str) -> str:
    if value.lower() == "null":
        return value  # refused later: no value is meant, and not a text of four letters
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return value
    # In Hydra's grammar a backslash is special only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


# What is wrong with a command line


def _override_problem(
    text: str, line: CommandLine, raw: Mapping[object, object], options: Mapping[str, Sequence[str]]
) -> Problem | None:
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["value"] is None and match["prefix"] != "~"):
        is_name = re.fullmatch(r"[A-Za-z]\w*", text) and text not in all_keys()
        hint = f"did you mean --config-name {text}?" if is_name else "see --help"
        message = "is not an override; write KEY=VALUE, without spaces around ="
        return Problem(key=text, value="", message=message, hint=hint)
    override = _Override(text, match["prefix"] or "", match["key"], match["value"])
    key, value = override.key, override.value or ""
    if re.match(r"hydra\b", key):
        message, hint = "is for Hydra's own launcher, which is not used", "run_dir=PATH is where a run writes"
        return Problem(key=key, value=value, message=message, hint=f"{hint}; for several runs write a loop")
    if key in _TEXTS_WITH_LINES and (escape := _LINE_ESCAPE.search(value)):
        message = f"contains a backslash and the letter {escape[0][1]}, which a command line keeps as they are"
        hint = "for the character itself write $'KEY=...' in bash; a YAML file distinguishes the two"
        return Problem(key=key, value=value, message=message, hint=hint)
    if key not in options or override.value is None:
        return _value_problem(override)
    section = "algorithm" if key == "correction" else key
    # A file without a defaults list, such as the config.yaml of a run, contains whole sections. An option laid over one
    # would keep what the option leaves at a default.
    if override.prefix != "~" and "defaults" not in raw and isinstance(raw.get(section), dict):
        message = f"would be mixed with the section {section} of {line.config_name}.yaml"
        hint = f"set single keys ({section}.KEY=VALUE), or start from a configuration with a defaults list"
        return Problem(key=key, value=value, message=message, hint=hint)
    if value in options[key]:
        return None
    close = close_word(value, options[key])
    hint = f"did you mean {key}={close}?" if close else ""
    hint = OTHER_WORDS.get(value.lower(), hint) if key == "device" else hint
    return Problem(key=key, value=value, message=f"must be one of {', '.join(options[key])}", hint=hint)


def _value_problem(override: _Override) -> Problem | None:
    name, value = override.key, override.value or ""
    try:
        if not _parsed(override).is_sweep_override():
            return None
    except HydraException as error:
        key = all_keys().get(name)
        if key is None and name.split(".")[0] not in all_keys():
            return Problem(key=name, value=value, message="unknown key", hint=suggestion(name))
        message = f"cannot be read: {str(error).splitlines()[0]}"
        text = '["VALUE"]' if key is not None and isinstance(key.default, list) else '"VALUE"'
        hint = f"put text with special characters in quotes, twice on a shell: {name}='{text}'"
        return Problem(key=name, value=value, message=message, hint=hint)
    hint = f"write a loop: for value in ...; do python -m trainer {name}=$value run_dir=runs/$value; done"
    return Problem(key=name, value=value, message="is a list of runs; one run takes one value", hint=hint)


def _no_such_config(line: CommandLine, known: list[str]) -> Problem:
    path = Path(f"{line.config_name}.yaml")
    close = difflib.get_close_matches(path.stem, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    hint += "name a folder with your own YAML files with --config-dir"
    if len(path.parts) > 1 and path.is_file():
        hint = f"write --config-dir {path.parent} --config-name {path.stem}"
    elif line.config_dir is not None and (line.config_dir / path.with_suffix(".yml")).is_file():
        hint = f"rename {path.with_suffix('.yml')} to {path}"
    message = f"must be one of {', '.join(known)}"
    return Problem(key="--config-name", value=line.config_name, message=message, hint=hint)


def _hydra_problem(line: CommandLine, error: Exception) -> Problem:
    text = " ".join(part.strip() for part in str(error).splitlines() if part.strip())
    hint = "check the YAML files and the overrides; --cfg job shows the result"
    if "defaults list" in text:
        hint = f"let {line.config_name}.yaml begin with `defaults: [tiny, _self_]` or the like, or write +GROUP=OPTION"
    twice = re.search(r"Multiple values for (\w+)", text)
    if twice and any(one.prefix == "+" and one.key == twice[1] for one in _overrides(line)):
        hint = f"{line.config_name}.yaml has an option of {twice[1]} already: leave the plus out"
    return Problem(key=f"--config-name {line.config_name}", value="", message=f"cannot be composed: {text}", hint=hint)
