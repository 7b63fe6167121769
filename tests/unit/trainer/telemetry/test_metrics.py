"""Metric values: merging in parts equals computing at once; JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.telemetry.jsonable import to_jsonable
from trainer.telemetry.metrics import Histogram, Max, Mean, Sum, merge, reduce_all

parts_of_ints = st.lists(st.lists(st.integers(0, 20), max_size=20), min_size=1, max_size=6)


@given(parts_of_ints)
def test_merging_parts_equals_computing_over_everything(parts: list[list[int]]) -> None:
    flat = [value for part in parts for value in part]
    metrics = [
        {"m": Mean.of(part), "s": Sum(value=sum(part)), "h": Histogram.of(part), "x": Max(value=max(part, default=-1))}
        for part in parts
    ]
    reduced = reduce_all(merge(*metrics))
    assert reduced["s"] == sum(flat)
    assert reduced["x"] == max(flat, default=-1)
    if not flat:
        assert "m" not in reduced
        assert "h/mean" not in reduced
        return
    assert reduced["m"] == pytest.approx(np.mean(flat))
    assert reduced["h/mean"] == pytest.approx(np.mean(flat))
    assert reduced["h/max"] == max(flat)
    # "inverted_cdf" is numpy's name for the smallest value with at least that share at or below it.
    assert reduced["h/p50"] == np.quantile(flat, 0.5, method="inverted_cdf")
    assert reduced["h/p90"] == np.quantile(flat, 0.9, method="inverted_cdf")
    assert reduced["h/histogram"] == {str(value): flat.count(value) for value in sorted(set(flat))}


def test_a_mean_of_unequal_parts_is_not_the_mean_of_means() -> None:
    assert reduce_all(merge({"m": Mean.of([0.0])}, {"m": Mean.of([3.0, 3.0, 3.0])})) == {"m": 2.25}


def test_a_nan_survives_in_a_maximum_in_either_order() -> None:
    for a, b in [(1.0, math.nan), (math.nan, 1.0)]:
        assert math.isnan(Max(value=a).merged(Max(value=b)).value)


def test_one_name_has_one_kind() -> None:
    with pytest.raises(TypeError, match="both a Mean and a Sum"):
        merge({"m": Mean(sum=1, count=1)}, {"m": Sum(value=1)})


@dataclass
class Point:
    x: float
    where: Path


def test_numpy_dataclasses_and_paths_become_json() -> None:
    value = {
        "b": np.bool_(True), "i": np.int64(3), "f": np.float32(0.5), "a": np.arange(3), 1: {"z", "y"},
        "p": Point(x=math.nan, where=Path("a/b")), "inf": [math.inf, -math.inf, np.float32("nan"), 1.5],
    }  # fmt: skip
    assert json.loads(json.dumps(to_jsonable(value), allow_nan=False)) == {
        "b": True, "i": 3, "f": 0.5, "a": [0, 1, 2], "1": ["y", "z"],
        "p": {"x": None, "where": "a/b"}, "inf": [None, None, None, 1.5],
    }  # fmt: skip


@pytest.mark.parametrize("value", [b"bytes", object(), Point])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot write"):
        to_jsonable({"deep": [value]})
