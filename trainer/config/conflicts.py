"""The ways in which a key can be wrong beside the others: it contradicts them, or nothing reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.keys import all_keys, value_text
from trainer.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from trainer.config.schema import RunConfig

NO_EFFECT = "has no effect: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread(Problem):
    """A key that nothing reads, and that nothing is lost without: only a problem if someone asked for it by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ineffective(Problem):
    """A key that was moved away from its default and that nothing reads: nothing is lost if it goes back."""


def problems_of(found: Iterable[Problem], *, written: Collection[str] = ()) -> list[Problem]:
    """`found` without the `Unread` keys that are not `written`."""
    return [problem for problem in found if not isinstance(problem, Unread) or problem.key in written]


def value_of(config: RunConfig, key: str) -> object:
    """The value of a key by its dotted path."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def conflict(config: RunConfig, key: str, allowed: str, do: str, *also: str) -> Problem:
    """`key` cannot have its value; `also` are the keys that it does not go together with."""
    return Problem(key=key, got=value_text(value_of(config, key)), allowed=allowed, do=do, also=also)


def ineffective(config: RunConfig, key: str, why: str, *also: str) -> Iterator[Problem]:
    """Nothing reads `key`: `Ineffective` if it was moved away from its default, `Unread` otherwise."""
    default = all_keys()[key].default
    if value_of(config, key) != default:
        got, do = value_text(value_of(config, key)), f"leave it at {value_text(default)}"
        yield Ineffective(key=key, got=got, allowed=f"{NO_EFFECT}{why}", do=do, also=also)
    else:
        yield moot(config, key, why, *also)


def moot(config: RunConfig, key: str, why: str, *also: str) -> Unread:
    """Nothing reads `key` here, and a YAML file may well hold a value for the runs in which something does."""
    got = value_text(value_of(config, key))
    return Unread(key=key, got=got, allowed=f"{NO_EFFECT}{why}", do="leave it out", also=also)
