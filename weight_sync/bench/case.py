"""One configuration to measure: what the command line, a `--case` string or a line of a suite file says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from weight_sync.bench.shapes import Architecture, architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NUM_WARM_UPS = 2
"""Syncs before those that count: the first opens device code, the second finds everything open."""


class CaseError(ValueError):
    """A configuration that cannot be measured here. Says what to change."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `python -m weight_sync.bench --help` for the meaning of each field."""

    model: str = "qwen2.5-7b"
    learners: int = 1
    replicas: int = 1
    tp: int = 1
    colocate: bool = False
    device: str = "auto"
    transport: str = "auto"
    commit: Literal["auto", "staged", "inplace"] = "auto"
    dtype: str = "bfloat16"
    master_dtype: str = "float32"
    syncs: int = 20
    slots: int = 2
    verify: bool = True
    churn: bool = False
    timeout: float = 60.0
    case_timeout: float = 300.0
    baselines: bool = True
    bucket_mib: int = 512
    engine: Literal["synthetic", "vllm"] = "synthetic"
    requests: int = 64
    max_tokens: int = 256
    gpu_memory_utilization: float = 0.4
    enforce_eager: bool = False
    option: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in {"learners": 1, "replicas": 1, "tp": 1, "syncs": 1, "slots": 1, "requests": 1}.items():
            if getattr(self, name) < least:
                raise CaseError(f"{name} must be >= {least}, got {getattr(self, name)}")
        architecture(self.model)

    @property
    def architecture(self) -> Architecture:
        return architecture(self.model)

    @property
    def num_workers(self) -> int:
        return self.replicas * self.tp

    @property
    def label(self) -> str:
        """One line for people: what this case is."""
        place = " colocated" if self.colocate else ""
        engine = "" if self.engine == "synthetic" else f", {self.engine}"
        return f"{self.model} {self.learners} -> {self.replicas} x TP{self.tp}{place}{engine}"


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """Device index of every learner rank, and of every worker of every replica."""

    learners: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]


def assign_devices(case: Case, num_devices: int) -> Devices:
    """Learners first, engine workers on the following devices; colocated, worker `i` shares device `i`.

    Raises:
        CaseError: there are fewer devices than processes.
    """
    first = 0 if case.colocate else case.learners
    needed = max(case.learners, first + case.num_workers)
    if needed > num_devices:
        hint = "" if case.colocate else ", or --colocate to let them share"
        raise CaseError(
            f"{case.label} needs {needed} devices, one per process, and {num_devices} are visible; use fewer "
            f"--learners, --replicas or --tp{hint}"
        )
    starts = [first + replica * case.tp for replica in range(case.replicas)]
    return Devices(
        learners=tuple(range(case.learners)), replicas=tuple(tuple(range(start, start + case.tp)) for start in starts)
    )


def read_suite(path: Path, defaults: Mapping[str, Any]) -> list[Case]:
    """The cases of a JSON file: a list of objects, each with the fields in which it differs from `defaults`.

    Raises:
        CaseError: not such a file, or an unknown field.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError(f"cannot read the suite {path}: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise CaseError(f'{path} must hold a list of objects such as {{"model": "qwen2.5-7b", "learners": 4}}')
    return [make_case({**defaults, **entry}, where=f"{path}, case {i}") for i, entry in enumerate(entries, start=1)]


def make_case(fields: Mapping[str, Any], *, where: str) -> Case:
    """
    Raises:
        CaseError: names `where` and the field.
    """
    try:
        return msgspec.convert(dict(fields), Case)
    except (msgspec.ValidationError, ValueError) as error:
        raise CaseError(f"{where}: {error}") from error
