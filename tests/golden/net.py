"""The golden net: what the house does today, part by part, as plain data; and how two records are compared.

    cases of a part ──seams.py──> what the code makes of them ──> data/PART.json, or a comparison with it

Only `seams.py` and `sync_seams.py` know where things are and what they are called. `python -m tests.golden.record`
writes the data again; every difference is then reviewed like code.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DATA = Path(__file__).parent / "data"
SHOWN = 20
"""Differences of one case that are printed."""
SMALLEST = 1e-7
"""Numbers closer to each other are the same: what is left of a sum that should be 0."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of data."""

    name: str
    cases: Callable[[], Mapping[str, Any]]
    """Name -> what `play` is given."""
    play: Callable[[Any, Path], Any]
    """Plays one case in an empty folder, which is the working directory; returns what JSON can hold."""
    tolerance: float = 1e-6
    """Relative, of numbers that are no integers."""
    input_of: Callable[[str], Any] | None = None
    """Recorded name -> input, where cases are made from the code that they test; else they are made anew."""

    @property
    def file(self) -> Path:
        return DATA / f"{self.name}.json"

    @cached_property
    def recorded(self) -> dict[str, Any]:
        return json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """What is to be compared with the record."""
        return self.cases() if self.input_of is None else {name: self.input_of(name) for name in self.recorded}


def plain(value: Any) -> Any:
    """As JSON would give it back, with numbers of 7 digits."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    return value


def write(part: Part, records: Mapping[str, Any]) -> None:
    """A line for each case, or for each entry of one that has names in it, so that diffs can be read."""
    lines = [f"{json.dumps(name)}: {_lines(record)}" for name, record in records.items()]
    part.file.parent.mkdir(exist_ok=True)
    part.file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _lines(record: Any) -> str:
    if not isinstance(record, dict) or len(json.dumps(record)) < 120:
        return json.dumps(record)
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in record.items()) + "\n}"


def differences(expected: Any, found: Any, *, tolerance: float, where: str = "") -> Iterator[str]:
    """One line for each."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in [*expected, *(name for name in found if name not in expected)]:
            at = f"{where}/{name}"
            if name not in found:
                yield f"{at}: gone, was {_short(expected[name])}"
            elif name not in expected:
                yield f"{at}: new, is {_short(found[name])}"
            else:
                yield from differences(expected[name], found[name], tolerance=tolerance, where=at)
    elif isinstance(expected, list) and isinstance(found, list):
        for number, (was, is_now) in enumerate(zip(expected, found, strict=False)):
            yield from differences(was, is_now, tolerance=tolerance, where=f"{where}[{number}]")
        if len(expected) != len(found):
            yield f"{where}: has {len(found)} entries, had {len(expected)}"
    elif not _is_same(expected, found, tolerance):
        yield f"{where}: is {_short(found)}, was {_short(expected)}"


def _is_same(expected: Any, found: Any, tolerance: float) -> bool:
    numbers = [value for value in (expected, found) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == 2 and any(isinstance(number, float) for number in numbers):
        return math.isclose(expected, found, rel_tol=tolerance, abs_tol=SMALLEST)
    return type(expected) is type(found) and expected == found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def digest(*arrays: Any) -> str:
    """Of integers and truth values, bit for bit."""
    hashed = hashlib.sha256()
    for array in arrays:
        exact = np.asarray(array)
        assert exact.dtype.kind in "iub", exact.dtype
        hashed.update(f"{exact.dtype.kind}{exact.shape}".encode() + exact.astype(np.int64).tobytes())
    return hashed.hexdigest()[:12]


def sums(*arrays: Any) -> list[float]:
    """Of numbers that may differ in their last bits from machine to machine: how many, the sum of their sizes, and two
    weighted sums that see where each of them stands."""
    flat = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    at = np.arange(len(flat))
    return [
        len(flat),
        *(float(np.sum(flat * weights)) for weights in (np.sign(flat), np.cos(at), np.sin(0.7 * at + 1))),
    ]
