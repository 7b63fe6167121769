"""Tables of the documentation equal the raw results next to them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from scripts.ablation import GOAL, SUITES
from tests.house.source import ROOT

DATA = ROOT / "docs" / "data"


def results(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def rows(document: str) -> list[list[str]]:
    """The cells of all rows of all tables, without marks."""
    lines = (ROOT / "docs" / document).read_text(encoding="utf-8").splitlines()
    return [[re.sub("[`*]", "", cell).strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]


@pytest.mark.parametrize("suite", SUITES)
def test_every_run_of_an_ablation_was_made_and_learned_what_it_had_to(suite: str) -> None:
    made = results(f"ablation_{suite}.json")["runs"]
    assert [run["name"] for run in made] == [run.name for run in SUITES[suite]]
    assert all(run["ok"] and run["best"] >= planned.goal for run, planned in zip(made, SUITES[suite], strict=True))
    assert GOAL >= 0.9


@pytest.mark.parametrize(("suite", "accuracy_at"), [("modes", -1), ("mismatch", -1), ("algorithms", None)])
def test_rows_of_ablations_are_their_results(suite: str, accuracy_at: int | None) -> None:
    written = {row[0].replace(",", ""): row for row in rows("ablation.md")}
    for run in results(f"ablation_{suite}.json")["runs"]:
        row = written[run["name"].replace("S=", "S = ")]
        first, last = (f"{run['points'][at]['accuracy']:.3f}" for at in (0, -1))
        assert row[1] == (f"{run['best']:.3f}" if accuracy_at is not None else f"{first} -> {last}")
        assert row[2] == str(run["num_steps"])


def test_rows_of_the_bench_are_its_results() -> None:
    written = rows("benchmarks.md")
    for path in sorted(DATA.glob("bench_*.json")):
        for name, run in results(path.name)["runs"].items():
            figures = run["figures"]
            step_s, rate = f"{figures['step_s']['mean']:.2f} s", f"{figures['tokens_per_s_per_device']:,.0f}"
            assert any(row[3].startswith(step_s) and row[4] == rate for row in written if len(row) > 4), (
                path.name,
                name,
            )


def test_rows_of_the_control_plane_are_its_results() -> None:
    written = [" ".join(row) for row in rows("benchmarks.md")]
    for kind, digits in (("virtual", 3), ("ray", 2)):
        for run in results("control_plane.json")[kind]:
            cost = f"{run['cpu_ms_per_trajectory']:.{digits}f} ms"
            groups = f"{run['groups_generated']:,}"
            found = [row for row in written if f" {groups} " in f" {row} " and f" {cost} " in f" {row} "]
            assert found, (groups, cost)
