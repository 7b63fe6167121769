"""The two ways in which a key can be wrong beside the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.describe import all_keys, value_text
from trainer.config.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema.run import RunConfig


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
    """A problem if `key` was moved away from its default although nothing reads it."""
    default = all_keys()[key].default
    if value_of(config, key) != default:
        yield conflict(config, key, f"has no effect: {why}", f"leave it at {value_text(default)}", *also)
