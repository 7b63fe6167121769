"""How a section of the configuration is declared, and how its keys are read back for messages and documents."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

S = TypeVar("S")

_SIGNS: Mapping[type, str] = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def is_dotted_path(name: str) -> bool:
    """Whether `name` can be `package.module.function`. Nothing is imported."""
    return _PATH.fullmatch(name) is not None


def _as_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 1e3


def _as_word(value: object) -> object:
    # YAML 1.1 reads a bare `off` or `on` as a boolean.
    return ("on" if value else "off") if isinstance(value, bool) else value


def _as_text(value: object) -> object:
    # An environment variable such as FOO: 1 reads as a number in YAML and means the text "1".
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _expand_home(path: str) -> str:
    # A Path would turn hub names and "" into something else.
    return os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111


def _require_dots(name: str) -> str:
    if not is_dotted_path(name):
        raise PydanticCustomError("dotted_path", "not a dotted path")
    return name


Int = Annotated[int, Strict(), BeforeValidator(_as_integer)]
NonNegativeInt = Annotated[Int, Ge(0)]
PositiveInt = Annotated[Int, Ge(1)]
Number = Annotated[float, Strict()]
"""May be infinite or NaN; rules look at it where that matters."""
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NonNegativeFloat = Annotated[Float, Ge(0)]
PositiveFloat = Annotated[Float, Gt(0)]
Fraction = Annotated[Float, Ge(0), Le(1)]
PositiveFraction = Annotated[Float, Gt(0), Le(1)]
Bool = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
PathText = Annotated[str, Strict(), AfterValidator(_expand_home)]
"""May name a file of the user; a leading `~` is expanded."""
Name = Annotated[str, BeforeValidator(str)]
"""Of an entry of a map: a number in YAML is a name here."""
EnvText = Annotated[str, Strict(), BeforeValidator(_as_text)]
DottedPath = Annotated[str, Strict(), AfterValidator(_require_dots)]
OnOff = BeforeValidator(_as_word)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type[S]) -> type[S]:
    """A sealed dataclass whose constructor checks every key and refuses unknown ones."""
    decorate = dataclass(
        frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True)
    )
    return cast("type[S]", decorate(cls))


class Key(NamedTuple):
    """One key, or one section, of the configuration."""

    path: str
    """Dotted path, e.g. "learner.lr"."""
    hint: Any
    """Type annotation without validators."""
    default: Any
    doc: str
    """The text under its declaration."""
    bounds: str
    """E.g. "> 0 and <= 1"; empty without bounds."""

    @property
    def kind(self) -> str:
        """Type and bounds in words, e.g. "integer or null, >= 1"."""
        return f"{type_text(self.hint)}, {self.bounds}" if self.bounds else type_text(self.hint)

    @property
    def is_section(self) -> bool:
        return is_dataclass(self.hint)

    @property
    def entry(self) -> Any:
        """The type of the entries of a map or list; None for everything else."""
        return get_args(self.hint)[-1] if get_origin(self.hint) in (dict, list) else None

    @property
    def section_of_entries(self) -> type | None:
        """The section that each entry of a map of sections is; None for everything else."""
        return self.entry if isinstance(self.entry, type) and is_dataclass(self.entry) else None

    @property
    def is_text(self) -> bool:
        """Whether values are plain text: free, or one of a list of words."""
        has_others = beside_words(self.hint) not in (None, str)
        return self.hint is str or (not has_others and all(isinstance(one, str) for one in words_of(self.hint) or (0,)))


@cache
def keys_of(section: type, prefix: str = "") -> Sequence[Key]:
    """The keys and sections of `section`, not those inside of its sections."""
    hints, limits = get_type_hints(section), get_type_hints(section, include_extras=True)
    return [
        Key(
            path=f"{prefix}{name}",
            hint=hints[name],
            default=info.get_default(call_default_factory=True),
            doc=" ".join((info.description or "").split()),
            bounds=" and ".join(_bounds(limits[name])),
        )
        for name, info in cast("Any", section).__pydantic_fields__.items()
    ]


def _bounds(hint: Any) -> list[str]:
    if get_origin(hint) is not Annotated:
        return [text for arg in _alternatives(hint) for text in _bounds(arg)]
    limits = [limit for limit in hint.__metadata__ if type(limit) in _SIGNS]
    return [f"{_SIGNS[type(one)]} {value_text(getattr(one, type(one).__name__.lower()))}" for one in limits]


def words_of(hint: Any) -> tuple[object, ...]:
    """The words of `Literal[...]`, also with `str` or None as alternatives; empty for other types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next((words for arg in _alternatives(hint) if (words := words_of(arg))), ())


def beside_words(hint: Any) -> Any:
    """`X` for `X | Literal[...]`; None for every other type."""
    others = [arg for arg in _alternatives(hint) if arg is not type(None) and get_origin(arg) is not Literal]
    return others[0] if words_of(hint) and others else None


def without_null(hint: Any) -> Any:
    """`X` for `X | None`, every other type unchanged."""
    alternatives = _alternatives(hint)
    return next(arg for arg in alternatives if arg is not type(None)) if type(None) in alternatives else hint


def type_text(hint: Any) -> str:
    """A type in words: "integer", "one of a, b", "number or null"."""
    if (other := without_null(hint)) is not hint:
        return f"{type_text(other)} or null"
    if words := words_of(hint):
        if (other := beside_words(hint)) not in (None, str):
            return ", ".join([type_text(other), *map(str, words[:-1])]) + f" or {words[-1]}"
        custom = ", or the dotted path of your own function" if _alternatives(hint) else ""
        return "one of " + ", ".join(map(str, words)) + custom
    if get_origin(hint) is dict:
        return f"map of name to {type_text(get_args(hint)[1])}"
    if get_origin(hint) is list:
        return f"list of {type_text(get_args(hint)[0])}"
    if is_dataclass(hint):
        return "section"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}[hint]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else ()


def value_text(value: object) -> str:
    """A value as one would write it in YAML or as an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return '""' if value == "" else str(value)
