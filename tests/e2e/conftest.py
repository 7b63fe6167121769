"""Whole runs as processes. All share one cache."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.fakes.trainer_process import ROOT, TrainerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def start(tiny_cache: Path) -> Iterator[Callable[..., TrainerProcess]]:
    """`start(run_dir, *overrides)`; everything that still runs is killed at the end of the test.

    Runs start in the repository, or in `directory`.
    """
    with contextlib.ExitStack() as stack:

        def begin(run_dir: Path, *overrides: str, cache: Path = tiny_cache, directory: Path = ROOT) -> TrainerProcess:
            process = TrainerProcess(run_dir, *overrides, cache=cache, directory=directory)
            stack.callback(process.close)
            return process

        yield begin
