"""What checks before a run find, collected so that all of it is reported at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

from rollout.errors import DataError
from trainer.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")
T = TypeVar("T")


class Findings:
    """
    Example:
        found = Findings()
        found.add(file_problems(cfg))
        tokenizer = found.attempt(policy_tokenizer, cfg)  # None if it cannot be loaded
        found.raise_if_any()
    """

    def __init__(self) -> None:
        self._errors: list[ConfigurationError | DataError] = []

    def add(self, problems: Iterable[Problem]) -> None:
        if problems := list(problems):
            self._errors.append(ConfigurationError(problems))

    def attempt(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `make` returns; None if it raises."""
        try:
            return make(*args, **kwargs)
        except (ConfigurationError, DataError) as error:
            self._errors.append(error)
            return None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Without repetitions; those of the data are under the key `task`."""
        found: dict[str, Problem] = {}
        for error in self._errors:
            of_data = isinstance(error, DataError)
            for one in (Problem(key="task", value="", message=str(error)),) if of_data else error.problems:
                found[str(one)] = one
        return tuple(found.values())

    def raise_if_any(self) -> None:
        """A single error is raised as it is."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigurationError(self.problems) from self._errors[0]
