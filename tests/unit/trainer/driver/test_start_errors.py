"""Exit code 2 is for what keeps a run from starting; the same errors in mid-training are failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import trainer.__main__ as main_module
from rollout.errors import DataError
from tests.fakes.scripted_run import InlineExecutor, Script, ScriptedDriver, ScriptedRun
from tests.fakes.virtual_time import run_virtual
from trainer.driver import run as run_module
from trainer.errors import CheckpointError, ModelError, first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Callable


def test_an_engine_that_missed_the_first_version_gets_no_request(scripted: Callable[..., ScriptedRun]) -> None:
    """It starts without weights, and would be taken for live until the second version comes."""
    run = scripted()
    told: list[tuple[str, int]] = []

    async def quarantine(name: str, _reason: str) -> None:
        told.append((name, len(run.world.numbers("generate"))))

    run.world.quarantine = quarantine  # type: ignore[attr-defined]

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        driver = ScriptedDriver(run)
        driver.members["replica_1"] = "dead"
        await driver._work()

    run_virtual(main())
    assert told == [("replica_1", 0)]


@pytest.mark.parametrize("kind", [CheckpointError, ModelError, DataError])
def test_an_error_of_the_start_is_a_failure_once_training_has_begun(
    scripted: Callable[..., ScriptedRun], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    run = scripted(Script(learner_error=lambda step: kind("shard is gone") if step == 2 else None))

    async def body() -> None:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        await ScriptedDriver(run)._work()

    def train(*_: object, **_keys: object) -> int:
        run_virtual(body())
        return 0

    monkeypatch.setattr(run_module, "run", train)
    with pytest.raises(run_module.TrainingFailed, match="after 2 steps") as caught:
        main_module.main([])
    assert one_line(first_cause(caught.value)) == f"{kind.__name__}: shard is gone"


@pytest.mark.parametrize("kind", [CheckpointError, ModelError, DataError])
def test_the_same_error_before_it_is_one_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def refuse(*_: object, **_keys: object) -> int:
        raise kind("shard is gone")

    monkeypatch.setattr(run_module, "run", refuse)
    assert main_module.main([]) == 2
    assert "cannot be used as configured: shard is gone" in capsys.readouterr().err
