"""Keys that a file sets and that nothing reads beside what else was chosen: back at their defaults.

`ppo_7b` has a learning rate for its critic; with `algorithm=grpo` there is no critic, and whoever asked for that should
not have to take the rate back. What someone asked for by name is refused instead (`validate.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.config.conflicts import NO_EFFECT, Ineffective
from trainer.config.keys import all_keys
from trainer.config.validate import check_combinations

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from trainer.config.schema import RunConfig


def ineffective_keys(config: RunConfig) -> set[str]:
    """Keys that stand away from their defaults, and that nothing reads."""
    return {problem.key for problem in _ineffective(config)}


def put_back(config: RunConfig, *, asked_for: Collection[str]) -> tuple[RunConfig, list[Ineffective]]:
    """`config` with every ineffective key at its default, and what was put back; keys and sections `asked_for` stay."""
    back: list[Ineffective] = []
    # A key that goes back may have been what another one is read with.
    while found := [problem for problem in _ineffective(config) if not _is_named(problem.key, asked_for)]:
        for problem in found:
            config = _with_value(config, problem.key.split("."), all_keys()[problem.key].default)
        back += found
    return config, back


def put_back_note(back: Sequence[Ineffective]) -> str:
    """One line for each reason, with the keys and the values that they had."""
    reasons = dict.fromkeys(problem.allowed for problem in back)
    return "".join(_note(reason, [p for p in back if p.allowed == reason]) for reason in reasons)


def _note(reason: str, back: Iterable[Ineffective]) -> str:
    keys = ", ".join(f"{problem.key}={problem.got}" for problem in back)
    return f"back at the default, since nothing reads it here: {keys} ({reason.removeprefix(NO_EFFECT)})\n"


def _ineffective(config: RunConfig) -> list[Ineffective]:
    return [problem for problem in check_combinations(config) if isinstance(problem, Ineffective)]


def _is_named(key: str, names: Collection[str]) -> bool:
    """Whether it is in `names`, or a section around it is, or an entry of it (`task.agent_args.tools`)."""
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in names)


def _with_value(section: Any, names: Sequence[str], value: object) -> Any:
    first, *rest = names
    return replace(section, **{first: _with_value(getattr(section, first), rest, value) if rest else value})
