"""The catalogue of metrics, docs/metrics.md, and what tests demand of a line of metrics: every name has a row, and no
required one is missing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tests.house.source import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class MetricRow(NamedTuple):
    name: str
    unit: str
    meaning: str
    healthy: str


_PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
METRICS = [
    MetricRow(name, *(cell.strip() for cell in cells.split("|")))
    for name, cells in re.findall(r"^\| `([^`]+)` \|(.*)\|$", _PAGE, re.MULTILINE)
]
REQUIRED = re.findall(r"`([^`]+)`", re.findall(r"^On every line: (.*?)\. Where", _PAGE, re.MULTILINE)[0])
_BY_NAME = {row.name: row for row in METRICS}


def find_row(name: str) -> MetricRow | None:
    """The row of a metric; None for an unknown one. `eval/NAME/...` of a set has that of `eval/...`."""
    found = _BY_NAME.get(name) or _BY_NAME.get(f"{name.rpartition('/')[0]}/*")
    of_set = name.split("/", 2)
    return find_row(f"eval/{of_set[2]}") if found is None and of_set[0] == "eval" and len(of_set) == 3 else found


def check_known(record: Mapping[str, object] | Iterable[str]) -> None:
    unknown = sorted(name for name in record if find_row(name) is None)
    assert not unknown, f"without a row in docs/metrics.md: {', '.join(unknown)}"


def check_complete(record: Mapping[str, object]) -> None:
    required = (*REQUIRED, *(["eval/version"] if "eval/accuracy" in record else []))
    missing = [name for name in required if name not in record]
    assert not missing, f"the record of step {record.get('step')} lacks {', '.join(missing)}"
