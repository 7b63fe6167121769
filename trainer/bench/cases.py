"""What is compared: modes, each with its division of the devices and its own keys. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.bench.workload import Workload

Mode = Literal["async", "sync", "colocated"]
STALENESS: dict[Mode, int] = {"async": 1, "sync": 0, "colocated": 0}
"""`mode.max_staleness` of a mode that says nothing else."""
STALENESS_KEY, STEPS_KEY = "mode.max_staleness", "trainer.total_steps"
MODEL_KEY = "model.path"
_TOLD_OTHERWISE = {
    STEPS_KEY: "is --warmup + --steps + S; give --steps N for N steps that count",
    **dict.fromkeys(("mode", "mode.name"), "is the MODE of --case MODE:SPLIT"),
    **dict.fromkeys(("learner.num_ranks", "rollout.num_replicas"), "follows from the SPLIT of --case MODE:SPLIT"),
    "rollout.tensor_parallel_size": "is --tp",
    **dict.fromkeys(
        ("trainer.groups_per_step", "rollout.group_size"), "is the workload's, which figures are reckoned by"
    ),
    "device": "is --device",
    "run_dir": "is the benchmark's own",
}
"""Key -> why a setting does not say it."""
MOST_SEQUENCES = 512
"""Answers that an engine is set up to run at once at most, unless a case says otherwise."""
_SPEC = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<mode>\w+):(?P<split>.+)")


class BadCase(ValueError):
    """A case on the command line makes no sense; the message says what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    name: str
    mode: Mode
    num_ranks: int
    num_replicas: int
    tensor_parallel_size: int
    overrides: tuple[str, ...] = ()
    """KEY=VALUE of this case alone; they win over what the benchmark sets."""

    @property
    def num_devices(self) -> int:
        """Devices that it occupies: engines and learner share them if it is colocated."""
        engines = self.num_replicas * self.tensor_parallel_size
        return max(self.num_ranks, engines) if self.mode == "colocated" else self.num_ranks + engines

    @property
    def max_staleness(self) -> int:
        """S of the run."""
        given = [text.partition("=")[2] for text in self.overrides if _key(text) == STALENESS_KEY]
        return int(given[-1]) if given else STALENESS[self.mode]

    @property
    def has_own_model(self) -> bool:
        """Whether a setting names the model, so that its weights and its shape are not the workload's."""
        return any(_key(text) == MODEL_KEY for text in self.overrides)


def parse_case(text: str, *, tensor_parallel_size: int) -> Case:
    """`[NAME=]MODE:SPLIT`, where SPLIT is LEARNERS+ENGINES in devices, or for colocated the devices of both.

    Raises:
        BadCase: it cannot be read, or the devices do not go up.

    Example:
        parse_case("async:2+2", tensor_parallel_size=1).name  # "async 2+2"
    """
    found = _SPEC.fullmatch(text)
    if found is None or found["mode"] not in get_args(Mode):
        modes = ", ".join(get_args(Mode))
        raise BadCase(f"case {text!r} must be [NAME=]MODE:SPLIT with MODE one of {modes}, e.g. async:2+2, colocated:4")
    mode: Mode = found["mode"]  # pyright: ignore[reportAssignmentType]
    learners, engines = _split(found["split"], mode, text)
    if engines % tensor_parallel_size:
        raise BadCase(f"case {text!r}: {engines} engine devices cannot be shared out to engines of --tp devices each")
    return Case(
        name=found["name"] if found["name"] else f"{mode} {found['split']}",
        mode=mode,
        num_ranks=learners,
        num_replicas=engines // tensor_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
    )


def with_overrides(cases: Sequence[Case], settings: Sequence[str]) -> list[Case]:
    """The cases with what `WHICH:KEY=VALUE` adds to them; WHICH is a mode, the name of a case, or `all`.

    Raises:
        BadCase: a setting cannot be read, reaches no case or is not for it to say, or two cases have one name.
    """
    names = [case.name for case in cases]
    if double := {name for name in names if names.count(name) > 1}:
        raise BadCase(f"two cases are called {', '.join(sorted(double))}; give one a name of its own: NAME=MODE:SPLIT")
    found: dict[str, list[str]] = {case.name: [] for case in cases}
    for setting in settings:
        which, colon, override = setting.partition(":")
        if not colon or "=" not in override:
            raise BadCase(f"setting {setting!r} must be WHICH:KEY=VALUE, e.g. sync:rollout.max_num_seqs=256")
        _check(override)
        reached = [case.name for case in cases if which in ("all", case.mode, case.name)]
        if not reached:
            raise BadCase(f"setting {setting!r} reaches no case; there are {', '.join(names)}")
        for name in reached:
            found[name].append(override)
    return [
        Case(
            name=case.name,
            mode=case.mode,
            num_ranks=case.num_ranks,
            num_replicas=case.num_replicas,
            tensor_parallel_size=case.tensor_parallel_size,
            overrides=tuple(found[case.name]),
        )
        for case in cases
    ]


def overrides_of(case: Case, work: Workload, *, num_steps: int, device: str) -> list[str]:
    """The command line of a case behind `--config-name bench`; `num_steps` are all that the run makes.

    The workload's model has no weights; one that a setting names has its own, unless that says otherwise.

    Every engine has seats for all answers that can be under way, not for its share of them: the router shares out
    tokens, so one engine may have more answers than the others, and none is to queue in it, whatever the mode.
    """
    answers = (case.max_staleness + 1) * work.groups_per_step * work.group_size
    return [
        f"device={device}",
        f"mode={case.mode}",
        f"learner.num_ranks={case.num_ranks}",
        f"rollout.num_replicas={case.num_replicas}",
        f"rollout.tensor_parallel_size={case.tensor_parallel_size}",
        f"rollout.num_workers={case.num_replicas}",
        f"rollout.max_num_seqs={min(MOST_SEQUENCES, answers)}",
        f"{STEPS_KEY}={num_steps}",
        *([] if case.has_own_model else ["model.random_weights=true"]),
        *case.overrides,
    ]


def _check(override: str) -> None:
    """Raises BadCase if figures would be of something else than the case says."""
    key, value = _key(override), override.partition("=")[2]
    if key in _TOLD_OTHERWISE:
        raise BadCase(f"{key} is not for --set: it {_TOLD_OTHERWISE[key]}")
    if key == STALENESS_KEY and not value.isdecimal():
        raise BadCase(f"{STALENESS_KEY} must be a number >= 0, got {value!r}")


def _key(override: str) -> str:
    """Of KEY=VALUE, which Hydra takes with signs before it too."""
    return override.partition("=")[0].lstrip("+")


def _split(split: str, mode: Mode, text: str) -> tuple[int, int]:
    """Devices of the learner and of the engines."""
    parts = split.split("+")
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) != (1 if mode == "colocated" else 2):
        form = "the number of devices, e.g. 4" if mode == "colocated" else "LEARNERS+ENGINES, e.g. 2+2"
        raise BadCase(f"case {text!r}: the split of mode {mode} must be {form}")
    return int(parts[0]), int(parts[-1])
