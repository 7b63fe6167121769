"""From plain containers to a sealed `RunConfig`, with every key checked and every problem collected.

A value that is wrong is reported and replaced by its default, so that one pass finds all problems.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, cast, get_args, get_origin

from trainer.config.keys import (
    KeyInfo,
    all_keys,
    bounds_text,
    is_optional,
    own_keys,
    takes_own_function,
    type_text,
    value_text,
    without_none,
    words_of,
)
from trainer.config.library import groups, packaged_configs
from trainer.config.other_names import OTHER_NAMES
from trainer.config.own_function import is_dotted_path, is_own
from trainer.config.schema import RunConfig
from trainer.errors import Problem


class _Refused(Exception):
    """A value does not fit its key; the message says what is allowed."""


def to_run_config(data: Mapping[str, object]) -> tuple[RunConfig, list[Problem]]:
    """Check `data` against the schema. Keys that are absent take their default."""
    problems: list[Problem] = []
    config = _section(RunConfig, data, "", problems)
    return cast(RunConfig, config), problems


def to_plain(config: object) -> dict[str, Any]:
    """The configuration as nested dictionaries of plain values, the inverse of `to_run_config`."""
    plain: dict[str, Any] = {}
    for declared in fields(cast(Any, config)):
        value = getattr(config, declared.name)
        if is_dataclass(value):
            plain[declared.name] = to_plain(value)
        elif isinstance(value, dict):
            entries = cast("dict[str, Any]", value)
            plain[declared.name] = {
                name: to_plain(entry) if is_dataclass(entry) else entry for name, entry in entries.items()
            }
        elif isinstance(value, list):
            plain[declared.name] = list(cast("list[Any]", value))
        else:
            plain[declared.name] = value
    return plain


def suggestion(path: str) -> str:
    """`did you mean ...` for a key that does not exist; empty if nothing is close."""
    known = list(all_keys())
    joined = path.replace(".", "_")
    if same := [key for key in known if key.replace(".", "_") == joined]:
        return f"did you mean {same[0]}?"
    leaf = path.rsplit(".", 1)[-1]
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf and not all_keys()[key].is_section]
    if len(same_leaf) in (1, 2):
        return "did you mean " + " or ".join(same_leaf) + "?"
    if leaf in OTHER_NAMES:
        return f"did you mean {OTHER_NAMES[leaf]}?"
    # Keys of the same section first, then those of others.
    section = path.rpartition(".")[0]
    for candidates in ([key for key in known if key.rpartition(".")[0] == section], known):
        by_leaf = {key.rsplit(".", 1)[-1]: key for key in reversed(candidates)}
        close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.7)
        if close:
            return f"did you mean {by_leaf[close[0]]}?"
    return ""


def close_word(value: str, words: Sequence[str]) -> str:
    """The word that `value` is a slip of; empty if it is none. Two of three letters are no likeness: gpu is not npu."""
    return next(iter(difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.7)), "")


def _section(cls: type, data: Mapping[str, object], prefix: str, problems: list[Problem]) -> object:
    infos = {info.path.removeprefix(prefix): info for info in own_keys(cls, prefix)}
    for name in data:
        if name not in infos:
            problems.extend(_unknown(f"{prefix}{name}", data[name], list(infos)))
    values: dict[str, object] = {}
    for name, info in infos.items():
        if info.is_section:
            values[name] = _subsection(info, data.get(name), problems)
        elif info.section_of_entries is not None and isinstance(data.get(name), Mapping):
            entries = cast("Mapping[object, object]", data[name])
            values[name] = {
                str(entry): _subsection(_entry(info, str(entry)), value, problems) for entry, value in entries.items()
            }
        elif name in data:
            values[name] = _checked(info, data[name], problems)
    return cls(**values)


def _entry(info: KeyInfo, name: str) -> KeyInfo:
    """The section of that name in a map of sections."""
    return replace(info, path=f"{info.path}.{name}", hint=info.section_of_entries)


def _subsection(info: KeyInfo, value: object, problems: list[Problem]) -> object:
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        names = [key.path for key in own_keys(info.hint)]
        is_option = isinstance(value, str) and value in groups([packaged_configs()]).get(info.path, [])
        choose = f"choose the group with {info.path}={value} or in `defaults`, or " if is_option else ""
        problems.append(
            Problem(
                key=info.path,
                got=value_text(value),
                allowed=f"expected a section with the keys {', '.join(names)}",
                do=f"{choose}set its keys one by one: {info.path}.{names[0]}=...",
            )
        )
        value = {}
    return _section(info.hint, cast("Mapping[str, object]", value), f"{info.path}.", problems)


def _unknown(path: str, value: object, siblings: list[str]) -> Iterator[Problem]:
    """A section whose name is near to none is told by the keys in it."""
    section = path.rpartition(".")[0]
    keys = f"keys of {section or 'the top level'}: {', '.join(siblings)}"
    if not section:
        keys += "; docs/coming_from.md has the names of other systems"
    close = difflib.get_close_matches(path.rpartition(".")[2], siblings, n=1, cutoff=0.7)
    if section and section not in all_keys() and close:  # an entry of a map: its keys are like those of no section
        do = f"did you mean {section}.{close[0]}?"
        yield Problem(key=path, got=value_text(value), allowed="unknown key", do=do)
        return
    inner = {path: value} if suggestion(path) else dict(_leaves(path, value))
    for leaf, given in inner.items():
        got = "{...}" if isinstance(given, Mapping) else value_text(given)
        do = suggestion(leaf)
        yield Problem(key=leaf, got=got, allowed="unknown key", do=do if do else keys)


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in cast("Mapping[object, object]", value).items():
        yield from _leaves(f"{path}.{name}", inner)


def _checked(info: KeyInfo, value: object, problems: list[Problem]) -> object:
    try:
        checked = _value(info.hint, value)
        _check_bounds(info.bounds, checked)
    except _Refused as refused:
        do = f"default {value_text(info.default)}: {info.doc}"
        problems.append(Problem(key=info.path, got=value_text(value), allowed=str(refused), do=do))
        return info.default
    if info.is_path and isinstance(checked, str) and checked.startswith("~"):
        return os.path.expanduser(checked)  # noqa: PTH111 - a Path would turn hub names and "" into something else
    return checked


def _value(hint: Any, value: object) -> object:
    """`value` as the type `hint` asks for. Raises `_Refused`."""
    if is_optional(hint):
        return None if value is None else _value_or_null(without_none(hint), value)
    if takes_own_function(hint):
        return _word_or_path(words_of(hint), value)
    if get_origin(hint) is Literal:
        return _word(words_of(hint), value)
    if get_origin(hint) is dict:
        return _mapping(get_args(hint)[1], value)
    if get_origin(hint) is list:
        return _list(get_args(hint)[0], value)
    if hint is Any:
        return value
    is_bool = isinstance(value, bool)
    if hint is bool and is_bool:
        return value
    if hint is int and isinstance(value, int) and not is_bool:
        return value
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e3
    if hint is float and isinstance(value, int | float) and not is_bool:
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    quote = "; put it in quotes" if hint is str and isinstance(value, int | float) else ""
    if hint is str and value is None:
        quote = '; no text is written as nothing behind the =, in YAML as ""'
    raise _Refused(f"expected {type_text(hint)}, got {_kind(value)}{quote}")


def _value_or_null(hint: Any, value: object) -> object:
    try:
        return _value(hint, value)
    except _Refused as refused:
        if str(value).lower() in {"none", "nil", "~", ""}:
            raise _Refused(f"{refused}; nothing is written null") from None
        raise


def _word(words: tuple[object, ...], value: object) -> object:
    # YAML 1.1 reads a bare `off` or `on` as a boolean.
    if isinstance(value, bool):
        value = {False: "off", True: "on"}[value]
    if value in words:
        return value
    close = close_word(str(value), [str(word) for word in words])
    hint = f"; did you mean {close}?" if close else ""
    raise _Refused(f"must be one of {', '.join(str(word) for word in words)}{hint}")


def _word_or_path(words: tuple[object, ...], value: object) -> object:
    own = "the dotted path of your own function (package.module.function)"
    if not isinstance(value, str) or not is_own(value):
        try:
            return _word(words, value)
        except _Refused as refused:
            raise _Refused(f"{refused}; or {own}") from None
    if not is_dotted_path(value):
        raise _Refused(f"must be one of {', '.join(str(word) for word in words)}, or {own}, which joins names by dots")
    return value


def _mapping(hint: Any, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise _Refused(f"expected a map of name to value, got {_kind(value)}")
    checked: dict[str, object] = {}
    for name, item in cast("Mapping[object, object]", value).items():
        # An environment variable such as FOO: 1 reads as a number in YAML and means the text "1".
        text = str(item) if hint is str and isinstance(item, int) and not isinstance(item, bool) else item
        try:
            checked[str(name)] = _value(hint, text)
        except _Refused as refused:
            raise _Refused(f"entry {name} {refused}") from None
    return checked


def _list(hint: Any, value: object) -> list[object]:
    if not isinstance(value, list):
        raise _Refused(f"expected a list of {type_text(hint)}, got {_kind(value)}; put it in brackets: [...]")
    checked: list[object] = []
    for number, item in enumerate(cast("list[object]", value)):
        try:
            checked.append(_value(hint, item))
        except _Refused as refused:
            raise _Refused(f"entry {number} {refused}") from None
    return checked


def _check_bounds(bounds: Mapping[str, float], value: object) -> None:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise _Refused("must be a finite number")
    inside = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    if not all(inside[name](value, limit) for name, limit in bounds.items()):
        raise _Refused(f"must be {bounds_text(bounds)}")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {value_text(value)}"
        case str():
            return f'the text "{value}"'
        case int() | float():
            return f"the number {value_text(value)}"
        case list():
            return "a list"
        case Mapping():
            return "a section"
        case _:
            return type(value).__name__
