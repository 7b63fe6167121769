"""The files of a run directory as plain data."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def left_in(path: Path) -> dict[str, Any]:
    """A list for each metric, how often each span is in the trace, and of trajectories the first of each status."""
    recorded = [line for file in sorted(path.glob("trajectories/*.jsonl")) for line in json_lines(file)]
    kinds = {line["status"]: line for line in reversed(recorded)}
    several = [line for line in recorded if any(len(one["versions"]) > 1 for one in line.get("trajectories", ()))]
    summary = path / "summary.json"
    return {
        "files": sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".")),
        "checkpoints": sorted(entry.name for entry in (path / "checkpoints").glob("*")),
        "summary": json.loads(summary.read_text()) if summary.exists() else None,
        "spans": _spans(path / "trace.json"),
        "groups": [[line["group_id"], line["status"], line["reason"]] for line in recorded],
        **{f"first {status} group": line for status, line in sorted(kinds.items())},
        **({"first group of several versions": several[0]} if several else {}),
        **{f"evaluations/{name}": values for name, values in _columns(path / "evaluations.jsonl").items()},
        **_columns(path / "metrics.jsonl"),
    }


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _spans(path: Path) -> dict[str, int]:
    """How often each is in a trace, by its row and its name without numbers."""
    events = json.loads(path.read_text()) if path.exists() else []
    names = [f"{event['cat']}: {re.sub('[0-9]+', 'N', event['name'])}" for event in events if event["ph"] in "Xb"]
    return dict(sorted(Counter(names).items()))


def _columns(path: Path) -> dict[str, Any]:
    """Name -> its values, line by line; one value alone that is in all of them, and null where a line has none."""
    lines = json_lines(path)
    columns = {name: [line.get(name) for line in lines] for line in lines for name in line}
    return {n: values[0] if values == [values[0]] * len(values) else values for n, values in sorted(columns.items())}
