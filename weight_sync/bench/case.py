"""One configuration to measure: the fields of a suite file, and the options of a command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from weight_sync.bench.shapes import MODELS, Architecture, architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NUM_WARM_UPS = 2
"""Syncs before those that count: the first opens device code, the second finds everything open."""


class CaseError(ValueError):
    """A configuration that cannot be measured here. Says what to change."""


class Option(NamedTuple):
    """How the command line describes a field."""

    meaning: str
    value: str = ""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field is an option of the command line."""

    model: Annotated[str, Option(", ".join(MODELS), "NAME")] = "qwen2.5-7b"
    learners: Annotated[int, Option("learner ranks; each holds a row shard as FSDP2 would", "N")] = 1
    replicas: Annotated[int, Option("engine replicas", "N")] = 1
    tp: Annotated[int, Option("workers per replica", "N")] = 1
    colocate: Annotated[bool, Option("worker i shares device i with learner i; else workers follow the learners")] = (
        False
    )
    device: Annotated[str, Option("auto, cpu or the name of a backend", "NAME")] = "auto"
    dtype: Annotated[str, Option("what the engines store and what travels", "NAME")] = "bfloat16"
    master_dtype: Annotated[str, Option("what the learners hold", "NAME")] = "float32"
    transport: Annotated[str, Option("auto, or a transport by name, such as ipc or shm", "NAME")] = "auto"
    commit: Annotated[Literal["auto", "staged", "inplace"], Option("beside generation, or in the pause")] = "auto"
    slots: Annotated[int, Option("versions a learner can hold at once", "N")] = 2
    verify: Annotated[bool, Option("compare digests of what arrives")] = True
    churn: Annotated[bool, Option("before every sync, allocate, free, and empty the allocator's cache everywhere")] = (
        False
    )
    option: Annotated[tuple[str, ...], Option("other fields of SyncOptions; may be repeated", "FIELD=VALUE")] = ()
    syncs: Annotated[int, Option(f"syncs that count, after {NUM_WARM_UPS} to warm up", "N")] = 20
    timeout: Annotated[float, Option("deadline of one sync", "S")] = 60.0
    case_timeout: Annotated[float, Option("deadline of a whole case", "S")] = 300.0
    baselines: Annotated[bool, Option("also measure two broadcast schemes in common use")] = True
    bucket_mib: Annotated[int, Option("size of a bucket of the packed baseline", "N")] = 512
    engine: Annotated[
        Literal["synthetic", "vllm"],
        Option(
            "an engine's parameters and nothing else, or real engines with random weights, generating all the while"
        ),
    ] = "synthetic"
    requests: Annotated[int, Option("vllm: requests in flight per replica", "N")] = 64
    max_tokens: Annotated[int, Option("vllm: tokens per request", "N")] = 256
    gpu_memory_utilization: Annotated[float, Option("vllm: fraction of the device", "F")] = 0.4
    enforce_eager: Annotated[bool, Option("vllm: no compilation, no device graphs")] = False

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
