"""Cases from the command line, and which device each process gets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from weight_sync.bench.__main__ import main, parser, read_cases
from weight_sync.bench.case import Case, CaseError, assign_devices

if TYPE_CHECKING:
    from pathlib import Path


def cases(*argv: str) -> list[Case]:
    return read_cases(vars(parser().parse_args(argv)))


def test_a_line_without_cases_is_one_case_with_the_defaults_of_case() -> None:
    assert cases() == [Case()]
    assert cases("--model", "tiny", "--no-baselines", "--colocate") == [
        Case(model="tiny", baselines=False, colocate=True)
    ]


def test_case_strings_and_suites_say_only_what_differs(tmp_path: Path) -> None:
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps([{"learners": 4}, {"model": "llama3-8b", "colocate": True}]))
    found = cases("--model", "tiny", "--syncs", "5", "--suite", str(suite), "--case", "--tp 2 --model qwen3-8b")
    assert found == [
        Case(model="tiny", syncs=5, learners=4),
        Case(model="llama3-8b", syncs=5, colocate=True),
        Case(model="qwen3-8b", syncs=5, tp=2),
    ]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"model": "gpt-9"}], "model must be one of"),
        ([{"learner": 2}], "learner"),
        ([{"learners": 0}], "learners must be >= 1, got 0"),
        ([], "must hold a list"),
    ],
)
def test_a_bad_suite_is_refused_by_name(entries: list[object], message: str, tmp_path: Path) -> None:
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps(entries))
    with pytest.raises(CaseError, match=message):
        cases("--suite", str(suite))


def test_learners_come_first_and_workers_take_the_following_devices() -> None:
    found = assign_devices(Case(learners=2, replicas=2, tp=2), 6)
    assert (found.learners, found.replicas) == ((0, 1), ((2, 3), (4, 5)))


def test_colocated_workers_share_the_learners_devices_in_order() -> None:
    found = assign_devices(Case(learners=2, replicas=2, colocate=True), 2)
    assert (found.learners, found.replicas) == ((0, 1), ((0,), (1,)))
    found = assign_devices(Case(learners=4, replicas=1, tp=2, colocate=True), 4)
    assert (found.learners, found.replicas) == ((0, 1, 2, 3), ((0, 1),))


def test_too_few_devices_are_refused_with_the_number_needed() -> None:
    with pytest.raises(CaseError, match=r"needs 6 devices, one per process, and 4 are visible; .* or --colocate"):
        assign_devices(Case(learners=4, replicas=2), 4)
    with pytest.raises(CaseError, match="needs 2 devices"):
        assign_devices(Case(learners=1, replicas=2, colocate=True), 1)


def test_a_line_that_makes_no_sense_exits_with_the_code_for_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "gpt-9"]) == 2
    assert "model must be one of" in capsys.readouterr().err
    assert main(["--case", "--json x.json"]) == 2
    with pytest.raises(SystemExit) as ended:
        main(["--frobnicate"])
    assert ended.value.code == 2
