"""How a run ends that reached its accuracy: nothing that came too late for it makes a failure of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from rollout.errors import NoProgress
from tests.fakes.scripted_run import Script, ScriptedRun, World
from trainer.errors import first_cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.driver import loops

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., loops.Parts]


class Perfect(World):
    """From some version on all answers are right, and the filter keeps no group."""

    right_from: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.script.reward_of = lambda _group, sample: 1.0 if self.live >= self.right_from else float(sample % 2)
        self.script.accuracy_of = lambda version: float(version >= self.right_from)


def perfect(run: ScriptedRun) -> ScriptedRun:
    run.world = Perfect(run.world.script)
    return run


@pytest.mark.parametrize("evaluate_s", [0.0, 30.0])
def test_a_run_that_reached_its_accuracy_does_not_fail_for_want_of_groups(
    scripted: Make, play: Play, evaluate_s: float
) -> None:
    """What is generated while the last evaluation runs, or for the step after the one that did it, is all filtered."""
    run = perfect(
        scripted(
            Script(evaluate_s=evaluate_s, train_s=3.0),
            trainer={"stop_at_accuracy": 0.9, "total_steps": 50, "eval_every": 1},
            algorithm={"filter_zero_variance": True, "max_refills_per_step": 20},
            checkpoint={"export_hf": True, "save_at_end": True},
        )
    )
    play(run)
    assert run.state.stop_reason == "accuracy_reached"
    assert run.state.last_evaluation is not None
    assert run.state.last_evaluation.version >= Perfect.right_from
    assert (run.telemetry.run_dir.export / "model").exists()
    assert run.world.num_generating == 0


def test_a_run_that_reached_its_accuracy_does_not_stall_either(scripted: Make, play: Play) -> None:
    """Its groups are filtered so slowly that the filter never says that it is too many."""
    run = perfect(
        scripted(
            Script(train_s=3.0, generate_s=(40.0, 60.0)),
            trainer={"stop_at_accuracy": 0.9, "total_steps": 50, "eval_every": 1, "stall_timeout_s": 200.0},
            algorithm={"filter_zero_variance": True, "max_refills_per_step": 100_000},
            checkpoint={"export_hf": True},
        )
    )
    play(run)
    assert run.state.stop_reason == "accuracy_reached"
    assert (run.telemetry.run_dir.export / "model").exists()


def test_a_run_that_can_no_longer_generate_fails_if_nothing_ends_it(scripted: Make, play: Play) -> None:
    keys = {"algorithm": {"filter_zero_variance": True}, "trainer": {"total_steps": 50, "eval_every": 1}}
    run = perfect(scripted(Script(train_s=3.0), **keys))
    with pytest.raises(BaseException) as caught:
        play(run)
    assert isinstance(first_cause(caught.value), NoProgress)


def test_generation_ends_before_the_last_evaluation(scripted: Make, play: Play) -> None:
    run = scripted(Script(generate_s=(2.0, 900.0)), trainer={"stop_at_accuracy": 0.3, "total_steps": 50})
    generating: list[int] = []

    def watch(parts: loops.Parts) -> None:
        evaluate = run.world.evaluate

        async def watched(*args: Any) -> Any:
            await asyncio.sleep(0)
            generating.append(run.world.num_generating)
            return await evaluate(*args)

        parts.evaluator._generate = watched

    parts = play(run, meddle=watch)
    assert generating[-1] == 0 < max(generating)
    assert parts.buffer.state_dict(run.state.step)["prompts"], "what was under way is owed"


def test_an_interrupt_after_the_accuracy_was_reached_says_what_it_left_out(scripted: Make, play: Play) -> None:
    run = scripted(
        Script(evaluate_s=20.0), trainer={"stop_at_accuracy": 0.2, "total_steps": 50}, checkpoint={"export_hf": True}
    )

    async def interrupt() -> None:
        while run.state.stop_reason is None:
            await asyncio.sleep(0.1)
        run.state.stop("interrupted")

    play(run, meddle=lambda _parts: interrupt())
    assert not run.telemetry.run_dir.export.exists()
    assert run.state.stop_reason == "interrupted"
