"""What tests demand of a line of metrics: every name has a row in the catalogue, and no required one is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.telemetry.metrics import REQUIRED, find_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def check_known(record: Mapping[str, object] | Iterable[str]) -> None:
    unknown = sorted(name for name in record if find_row(name) is None)
    assert not unknown, f"without a row in trainer/telemetry/metrics.py: {', '.join(unknown)}"


def check_complete(record: Mapping[str, object]) -> None:
    required = (*REQUIRED, *(["eval/version"] if "eval/accuracy" in record else []))
    missing = [name for name in required if name not in record]
    assert not missing, f"the record of step {record.get('step')} lacks {', '.join(missing)}"
