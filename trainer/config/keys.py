"""The schema as a flat list of keys, for conversion, validation, `--help` and the documentation.

Everything said about a key (type, default, bounds, text) is read from the dataclasses in `schema/`.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from trainer.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """One key of the configuration."""

    path: str
    """Dotted path, e.g. "learner.lr"."""
    hint: Any
    """Resolved type annotation."""
    default: Any
    doc: str
    bounds: Mapping[str, float]
    """Any of ge, gt, le, lt."""
    is_path: bool

    @property
    def is_section(self) -> bool:
        return is_dataclass(self.hint)

    @property
    def is_mapping(self) -> bool:
        return get_origin(self.hint) is dict

    @property
    def is_list(self) -> bool:
        return get_origin(self.hint) is list

    @property
    def section_of_entries(self) -> type | None:
        """The section that each entry of a map of sections is; None for everything else."""
        entry = get_args(self.hint)[1] if self.is_mapping else None
        return entry if is_dataclass(entry) and isinstance(entry, type) else None

    @property
    def is_text(self) -> bool:
        """Whether values are plain text: free, or one of a list of words."""
        return (
            self.hint is str
            or takes_own_function(self.hint)
            or (get_origin(self.hint) is Literal and all(isinstance(word, str) for word in get_args(self.hint)))
        )


def own_keys(cls: type, prefix: str = "") -> tuple[KeyInfo, ...]:
    """The keys of one section, not of the sections inside it."""
    hints = get_type_hints(cls)
    return tuple(_key_info(f, hints[f.name], prefix) for f in fields(cls))


@cache
def all_keys() -> Mapping[str, KeyInfo]:
    """Every key and section of `RunConfig` by its dotted path, in the order of the schema."""
    found: dict[str, KeyInfo] = {}

    def visit(cls: type, prefix: str) -> None:
        for info in own_keys(cls, prefix):
            found[info.path] = info
            if info.is_section:
                visit(info.hint, f"{info.path}.")

    visit(RunConfig, "")
    return found


def find_key(path: str) -> KeyInfo | None:
    """The key of that path, those in entries of maps of sections included; None if there is none."""
    found = all_keys().get(path)
    if found is not None:
        return found
    entry, _, _ = path.rpartition(".")
    parent = all_keys().get(entry.rpartition(".")[0])
    if parent is None or (section := parent.section_of_entries) is None:
        return None
    return next((info for info in own_keys(section, f"{entry}.") if info.path == path), None)


def is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint)


def takes_own_function(hint: Any) -> bool:
    """`Literal[...] | str`: one of some words, or the dotted path of a function."""
    return get_origin(hint) in (Union, UnionType) and str in get_args(hint) and type(None) not in get_args(hint)


def words_of(hint: Any) -> tuple[object, ...]:
    """The words of `Literal[...]`, and of `Literal[...] | str`."""
    literal = next(arg for arg in get_args(hint) if arg is not str) if takes_own_function(hint) else hint
    return get_args(literal)


def without_none(hint: Any) -> Any:
    """`X` for `X | None`."""
    return next(arg for arg in get_args(hint) if arg is not type(None))


def type_text(hint: Any) -> str:
    """A type in the words of a person: "integer", "one of a, b", "number or null"."""
    if is_optional(hint):
        return f"{type_text(without_none(hint))} or null"
    if takes_own_function(hint):
        return "one of " + ", ".join(str(word) for word in words_of(hint)) + ", or the dotted path of your own function"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(word) for word in words_of(hint))
    if get_origin(hint) is dict:
        return f"map of name to {type_text(get_args(hint)[1])}"
    if get_origin(hint) is list:
        return f"list of {type_text(get_args(hint)[0])}"
    if is_dataclass(hint):
        return "section"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}[hint]


def bounds_text(bounds: Mapping[str, float]) -> str:
    """E.g. "> 0 and <= 1"; empty without bounds."""
    sign = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return " and ".join(f"{sign[name]} {value_text(limit)}" for name, limit in bounds.items())


def value_text(value: object) -> str:
    """A value as one would write it in YAML or as an override."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return value or '""'
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _key_info(declared: Field[Any], hint: Any, prefix: str) -> KeyInfo:
    default = declared.default
    if declared.default_factory is not MISSING:
        default = declared.default_factory()
    meta = declared.metadata
    return KeyInfo(
        path=f"{prefix}{declared.name}",
        hint=hint,
        default=default,
        doc=meta["doc"],
        bounds={name: meta[name] for name in ("ge", "gt", "le", "lt") if meta[name] is not None},
        is_path=meta["is_path"],
    )
