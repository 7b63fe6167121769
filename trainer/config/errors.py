"""What is wrong with a configuration, told all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that keeps a run from starting.

    Example:
        Problem(key="mode.max_staleness", got="-1", allowed="must be >= 0", do="use 0 for on-policy training")
    """

    key: str
    """The key, override or argument that is wrong."""
    got: str
    """Its value as the user would write it; empty if there is none."""
    allowed: str
    """What is wrong with it, and what is allowed."""
    do: str = ""
    """What to do, where that does not follow from `allowed`."""
    also: tuple[str, ...] = ()
    """Further keys that take part in the problem."""

    def __str__(self) -> str:
        head = f"{self.key} = {self.got}" if self.got else self.key
        lines = [head, f"    {self.allowed}"]
        if self.do:
            lines.append(f"    -> {self.do}")
        return "\n".join(lines)


class ConfigurationError(Exception):
    """The configuration, or what it names, cannot be used. Nothing was started; the process exits with code 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        title = f"{count} problem{'' if count == 1 else 's'} in the configuration; nothing was started:"
        super().__init__("\n".join([title, *(f"\n  {problem}" for problem in self.problems)]))
