"""The house does what it did: every recorded case, played again.

A difference that is wanted is recorded with `python -m tests.golden.record PART`, and its diff reviewed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import pytest

from tests.golden.net import SHOWN, differences, plain
from tests.golden.parts import PARTS, stage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def on_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with stage(tmp_path_factory.mktemp("stage")):
        yield


@pytest.mark.parametrize("name", PARTS)
def test_no_case_is_missing_in_the_record(name: str) -> None:
    part = PARTS[name]
    assert list(part.recorded) == list(part.cases())


@pytest.mark.parametrize(("name", "case"), [(part.name, case) for part in PARTS.values() for case in part.inputs])
def test_a_case_ends_as_it_is_recorded(name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PARTS[name]
    monkeypatch.chdir(tmp_path)
    found = plain(part.play(part.inputs[case], tmp_path))
    different = list(islice(differences(part.recorded[case], found, tolerance=part.tolerance), SHOWN))
    assert not different, "\n".join([f"{name}: {case}", *different])
