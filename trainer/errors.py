"""Every exception that a part of the trainer raises for another, and how a cause is put into one line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


E = TypeVar("E", bound=BaseException)

MAX_LINE = 500
"""Characters of a failure's text that are shown on the screen."""

_TELLS = "tells_its_cause"
_LOG_NOTE = "the traceback is in "
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?:(?:\w+|<locals>)\.)*(?P<type>[^\W\d]\w*)(?:: |:?$)")
"""The line after the frames of a traceback, which are indented."""
_LINK = "For further information visit "
"""Pydantic ends the text of an error with a link to what its kind means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that keeps a run from starting.

    Example:
        Problem(key="mode.max_staleness", value="-1", message="must be >= 0", hint="use 0 for on-policy training")
    """

    key: str
    """The key, override or argument that is wrong."""
    value: str
    """Its value as the user would write it; empty if there is none."""
    message: str
    """What is wrong with it, and what is allowed."""
    hint: str = ""
    """What to do, where that does not follow from `message`."""
    related: tuple[str, ...] = ()
    """Further keys that take part in the problem."""

    def __str__(self) -> str:
        head = f"{self.key} = {self.value}" if self.value else self.key
        lines = [head, f"    {self.message}"]
        if self.hint:
            lines.append(f"    -> {self.hint}")
        return "\n".join(lines)


class ConfigurationError(Exception):
    """The configuration, or what it names, cannot be used. The process exits with code 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        title = f"{count} configuration error{'' if count == 1 else 's'}:"
        super().__init__("\n".join([title, *(f"\n  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[tuple[Problem, ...]]]:
        """It crosses processes, where an exception is rebuilt from its text."""
        return type(self), (self.problems,)


def tells_its_cause(error: E) -> E:
    """Marks an error whose text includes its causes, and who failed."""
    error.__dict__[_TELLS] = True
    return error


def first_cause(error: BaseException) -> BaseException:
    """The error that began it: down the causes, and into the first member of a group.

    An error without a text (a cancelled task below a timeout) is passed over: the one it led to has more. The search
    ends at one that `tells_its_cause`.
    """
    found, seen = error, set[int]()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        if str(inner).strip():
            found = inner
        if getattr(inner, _TELLS, False):
            return found
        carried = getattr(inner, "cause", None)
        if isinstance(carried, BaseException):
            # Ray wraps what an actor raised in an error of its own, whose text is a traceback.
            found = inner = carried
        elif isinstance(inner, BaseExceptionGroup):
            inner = cast("BaseExceptionGroup[BaseException]", inner).exceptions[0]
        else:
            inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
    return found


def one_line(error: BaseException) -> str:
    """Type and text of an error in one line of bounded length.

    An error that came from another process may carry its traceback as text. Then it is the error that this ends with.
    """
    name, lines = _raised(type(error).__name__, str(error).splitlines())
    stripped = [line.strip() for line in lines]
    text = " ".join(line for line in stripped if line and not line.startswith(_LINK)).removeprefix(f"{name}: ")
    if not text:
        return name
    return f"{name}: {text if len(text) <= MAX_LINE else text[:MAX_LINE] + ' ...'}"


def _raised(name: str, lines: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Type and text of the error that the last traceback in `lines` ends with; what is given if there is none."""
    begins = [number for number, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)]
    if not begins:
        return name, lines
    after = lines[begins[-1] + 1 :]
    for number, line in enumerate(after):
        if match := _RAISED.match(line):
            return match["type"], [line[match.end() :], *after[number + 1 :]]
    return name, [line for line in after if line.strip()][-1:]  # one that is printed in another way


def note_log(error: BaseException, path: Path) -> None:
    """Remember on the error that its traceback has been written to `path`."""
    error.add_note(f"{_LOG_NOTE}{path}")


def noted_log(error: BaseException) -> str | None:
    """The file that `note_log` has named; None if the traceback is in no file."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix(_LOG_NOTE) for note in notes if note.startswith(_LOG_NOTE)), None)


TESTED = "Qwen2, Qwen3, Qwen3-MoE, Llama or Mistral"
"""Kinds of models that the tests train."""


class ModelError(Exception):
    """The policy cannot be loaded or is of a kind we cannot train. The process exits with code 2."""


class CheckpointError(Exception):
    """A checkpoint is missing, truncated, or of another model. Names the file. The process exits with code 2."""


class LearnerError(Exception):
    """A learner rank failed or timed out; the whole learner group is unusable then."""


class TrainingDiverged(Exception):
    """A gradient, a value or a log-prob of the reference is not finite. Raised on every rank, before the optimizer
    touches a weight."""


class GradientsDiverged(TrainingDiverged):
    """Too many gradients in a row are not finite. Every weight is as the last step that went well has left it, and can
    be saved."""
