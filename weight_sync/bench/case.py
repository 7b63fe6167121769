"""One configuration to measure: the fields of a suite file, and the options of a command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from weight_sync.bench.shapes import MODELS, Architecture, architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DTYPE = "bfloat16"
"""What the engines store and what travels."""
NUM_WARM_UPS = 2
"""Syncs before those that count: the first opens device code, the second finds everything open."""


class CaseError(ValueError):
    """A configuration that cannot be measured here. Says what to change."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field is an option of the command line: its type, its meaning, and what stands for its value."""

    model: Annotated[str, ", ".join(MODELS), "NAME"] = "qwen2.5-7b"
    learners: Annotated[int, "learner ranks; each holds a row shard as FSDP2 would", "N"] = 1
    replicas: Annotated[int, "engine replicas", "N"] = 1
    tp: Annotated[int, "workers per replica", "N"] = 1
    colocate: Annotated[bool, "worker i shares device i with learner i; else workers follow the learners", ""] = False
    device: Annotated[str, "auto, cpu or the name of a backend", "NAME"] = "auto"
    master_dtype: Annotated[str, f"what the learners hold; {DTYPE} travels", "NAME"] = "float32"
    transport: Annotated[str, "auto, or a transport by name, such as ipc or shm", "NAME"] = "auto"
    commit: Annotated[Literal["auto", "staged", "inplace"], "beside generation, or in the pause", ""] = "auto"
    slots: Annotated[int, "versions a learner can hold at once", "N"] = 2
    churn: Annotated[bool, "before each sync, allocate, free, and empty the allocator's cache everywhere", ""] = False
    option: Annotated[tuple[str, ...], "other fields of SyncOptions; may be repeated", "FIELD=VALUE"] = ()
    syncs: Annotated[int, f"syncs that count, after {NUM_WARM_UPS} to warm up", "N"] = 20
    timeout: Annotated[float, "deadline of one sync", "S"] = 60.0
    case_timeout: Annotated[float, "deadline of a whole case", "S"] = 300.0
    baselines: Annotated[bool, "also measure two broadcast schemes in common use", ""] = True
    engine: Annotated[
        Literal["synthetic", "vllm"], "parameters and nothing else, or engines with random weights that generate", ""
    ] = "synthetic"
    requests: Annotated[int, "vllm: requests in flight per replica", "N"] = 64
    max_tokens: Annotated[int, "vllm: tokens per request", "N"] = 256
    gpu_memory_utilization: Annotated[float, "vllm: fraction of the device", "F"] = 0.4

    def __post_init__(self) -> None:
        for name in ("learners", "replicas", "tp", "syncs", "slots", "requests"):
            if getattr(self, name) < 1:
                raise CaseError(f"{name} must be >= 1, got {getattr(self, name)}")
        architecture(self.model)

    @property
    def architecture(self) -> Architecture:
        return architecture(self.model)

    @property
    def label(self) -> str:
        place = " colocated" if self.colocate else ""
        engine = "" if self.engine == "synthetic" else f", {self.engine}"
        return f"{self.model} {self.learners} -> {self.replicas} x TP{self.tp}{place}{engine}"


def assign_devices(case: Case, num_devices: int) -> tuple[list[int], list[list[int]]]:
    """Device of every learner rank, and of every worker of every replica. Engine workers follow the learners;
    colocated, worker `i` shares device `i`.

    Raises:
        CaseError: there are fewer devices than processes.
    """
    first = 0 if case.colocate else case.learners
    needed = max(case.learners, first + case.replicas * case.tp)
    if needed > num_devices:
        hint = "" if case.colocate else ", or --colocate to let them share"
        raise CaseError(
            f"{case.label} needs {needed} devices, one per process, and {num_devices} are visible; use fewer "
            f"--learners, --replicas or --tp{hint}"
        )
    starts = [first + replica * case.tp for replica in range(case.replicas)]
    return list(range(case.learners)), [list(range(start, start + case.tp)) for start in starts]


def read_cases(suite: Path | None, options: Mapping[str, Any]) -> list[Case]:
    """The case that `options` describe, or those of a JSON file: a list of objects, each with the fields in which it
    differs from them.

    Raises:
        CaseError: names the file, the case and the field that is wrong.
    """
    if suite is None:
        return [_case(options, where="command line")]
    try:
        entries = json.loads(suite.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError(f"cannot read the suite {suite}: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise CaseError(f'{suite} must hold a list of objects such as {{"model": "qwen2.5-7b", "learners": 4}}')
    return [_case({**options, **entry}, where=f"{suite}, case {i}") for i, entry in enumerate(entries, start=1)]


def _case(fields: Mapping[str, Any], *, where: str) -> Case:
    try:
        return msgspec.convert(dict(fields), Case)
    except (msgspec.ValidationError, ValueError) as error:
        raise CaseError(f"{where}: {error}") from error
