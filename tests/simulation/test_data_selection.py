"""What the pass-rate filter, the curriculum and a custom group filter do to a run in virtual time."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.errors import NoProgress
from tests.fakes.metric_names import check_known
from tests.fakes.scripted_run import Script, ScriptedRun, World, config, lines, prompt_set, telemetry_in, watch_batches
from tests.fakes.virtual_time import run_virtual
from trainer.algorithms.group_filter import FinishedGroup, GroupFilterError
from trainer.driver.checkpointing import ResumePoint
from trainer.driver.datasets import make_source
from trainer.driver.state import RunState
from trainer.errors import first_cause
from trainer.learner import checkpoint

if TYPE_CHECKING:
    from rollout.prompts.prompt_source import PromptSet
    from rollout.types import Group, RolloutRequest

NUM_PROMPTS, GROUPS_PER_STEP = 60, 3
BOUNDS = {"pass_rate_min": 0.1, "pass_rate_max": 0.9}


class Graded(World):
    """Of three prompts one is never solved, one always, and one by every second response."""

    async def run_group(self, item: RolloutRequest) -> Group:
        group = await super().run_group(item)
        rewards = [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)][number(item.prompt.prompt_id) % 3]
        answers = [replace(t, reward=reward) for t, reward in zip(group.trajectories, rewards, strict=True)]
        return replace(group, trajectories=answers)


def number(prompt_id: str) -> int:
    return int(prompt_id.removeprefix("train/"))


def levelled(num_prompts: int) -> PromptSet:
    prompts = prompt_set(num_prompts)
    columns = [{"level": float(i % 7), "rate": [0.0, 1.0, 0.5][i % 3]} for i in range(num_prompts)]
    return replace(
        prompts, prompts=tuple(replace(p, metadata=c) for p, c in zip(prompts.prompts, columns, strict=True))
    )


class Played:
    """One run to its end; `trained` has the prompts of every step."""

    def __init__(
        self, *, total_steps: int = 60, num_prompts: int = NUM_PROMPTS, max_staleness: int = 0, timing: int = 0,
        resumed: ResumePoint | None = None, path: Path | None = None, **sections: Any,
    ) -> None:  # fmt: skip
        cfg = config(
            trainer={"total_steps": total_steps, "eval_every": 0, "eval_at_start": False, "eval_at_end": False},
            mode={"max_staleness": max_staleness},
            **{"algorithm": {"max_filtered_batches_per_step": 1000}, **sections},
        )
        state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
        if resumed is not None:
            state.load_state_dict(resumed.state["run"])
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder) / "run" if path is None else path
            with telemetry_in(cfg, where, resume_step=state.resumed_from_step) as telemetry:
                world = Graded(Script(generate_s=(0.1, 9.0), seed=timing))
                self.run = ScriptedRun(cfg, world, telemetry, state, num_held_out=0)
                self.run.source = make_source(cfg, levelled(num_prompts), resumed)
                if resumed is not None:
                    self.run.buffer.load_state_dict(resumed.state["buffer"], self.run.source.find)
                seen = watch_batches(self.run)
                run_virtual(self.run.run())
                self.trained = [[group.prompt_id for group in groups] for groups in seen]
                self.lines = lines(self.run)

    @property
    def useful_frac(self) -> float:
        """Of the trained groups, those from which anything is learned."""
        return float(np.mean([number(name) % 3 == 2 for step in self.trained for name in step]))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_pass_rate_filter_saves_training_slots(max_staleness: int) -> None:
    without = Played(max_staleness=max_staleness)
    filtered = Played(max_staleness=max_staleness, task=BOUNDS)
    assert without.useful_frac < 0.4
    assert filtered.useful_frac > 0.5
    assert len(filtered.trained) == 60
    last = filtered.lines[-1]
    check_known(last)
    assert last["data/skipped/too_hard"] > 0 < last["data/skipped/too_easy"]
    assert 0 < last["data/prompts_excluded"] <= 2 * NUM_PROMPTS / 3
    assert filtered.run.buffer.stats().filtered == {}
    assert {line["data/epoch"] for line in without.lines} == {0, 1, 2, 3}


def test_with_dynamic_sampling_it_saves_generation() -> None:
    dapo = {"dynamic_sampling": True, "max_filtered_batches_per_step": 1000}
    without, filtered = Played(algorithm=dapo), Played(algorithm=dapo, task=BOUNDS)
    assert without.useful_frac == filtered.useful_frac == 1.0
    assert without.run.buffer.stats().admitted > 2.7 * 60 * GROUPS_PER_STEP
    assert filtered.run.buffer.stats().admitted < 1.9 * 60 * GROUPS_PER_STEP


ALL = {**BOUNDS, "curriculum": "easy_to_hard", "difficulty_column": "level", "pass_rate_cooldown_epochs": 1}
DAPO = {"dynamic_sampling": True, "max_filtered_batches_per_step": 1000}


@pytest.mark.parametrize("num_prompts", [9, 60])
def test_without_staleness_a_repetition_trains_the_same_prompts_however_long_responses_take(num_prompts: int) -> None:
    """Epochs end within steps here, and refills are drawn while groups of the epoch before are on their way."""
    first, again = (Played(algorithm=DAPO, task=ALL, num_prompts=num_prompts, timing=t) for t in (0, 1))
    assert first.trained == again.trained
    assert first.lines[-1]["data/skipped/too_easy"] == again.lines[-1]["data/skipped/too_easy"] > 0


@pytest.mark.parametrize(("num_prompts", "stop_after"), [(9, 7), (9, 20), (60, 31)])
def test_a_resumed_run_trains_the_prompts_that_it_would_have_trained(
    tmp_path: Path, num_prompts: int, stop_after: int
) -> None:
    selected = {"total_steps": 40, "algorithm": DAPO, "task": ALL, "num_prompts": num_prompts}
    unbroken = Played(**selected)
    Played(checkpoint={"every_steps": stop_after, "keep_last": 9}, path=tmp_path / "run", **selected)
    path = tmp_path / "run" / "checkpoints" / f"step_{stop_after}"
    found = ResumePoint(path=path, state=checkpoint.read_state(path))
    resumed = Played(timing=5, resumed=found, **selected)
    assert resumed.trained == unbroken.trained[stop_after:]


def test_a_curriculum_trains_easy_prompts_first() -> None:
    played = Played(total_steps=20, task={"curriculum": "easy_to_hard", "difficulty_column": "level"})
    means = [line["data/difficulty_mean"] for line in played.lines]
    assert means == sorted(means)
    assert means[0] == 0
    assert means[-1] > 5
    by_rate = Played(total_steps=20, task={"curriculum": "easy_to_hard", "pass_rate_column": "rate"})
    assert [number(name) % 3 for step in by_rate.trained for name in step] == [1] * 20 + [2] * 20 + [0] * 20


def test_offline_pass_rates_keep_hopeless_prompts_away_from_the_first_step_on() -> None:
    played = Played(total_steps=6, task={**BOUNDS, "pass_rate_column": "rate"})
    assert played.useful_frac == 1.0


@pytest.mark.parametrize("algorithm", [{}, DAPO], ids=["trained", "dynamic sampling"])
def test_a_run_with_nothing_left_ends_with_thresholds_and_rates(algorithm: dict[str, Any]) -> None:
    with pytest.raises(BaseException) as caught:
        Played(algorithm=algorithm, task={"pass_rate_min": 0.6, "pass_rate_max": 0.9})
    cause = first_cause(caught.value)
    assert isinstance(cause, NoProgress)
    assert "task.pass_rate_min=0.6 to task.pass_rate_max=0.9" in str(cause)
    assert "0: 20, up to 0.5: 20, 1: 20" in str(cause)


def no_middle(group: FinishedGroup, *, level: float = 3.0) -> str | None:
    """Takes out one level, but for what was always solved."""
    return "middle_level" if group.prompt.metadata["level"] == level and group.rewards_G.mean() < 1 else None


def broken(group: FinishedGroup) -> str | None:
    """Reads a column that is not there."""
    return group.prompt.metadata["nowhere"]  # type: ignore[return-value]


def test_a_custom_filter_is_called_and_counted_by_its_reason() -> None:
    own = {"group_filter": f"{__name__}.no_middle", "group_filter_args": {"level": 4.0}}
    played = Played(total_steps=20, algorithm=own)
    wrong = {f"train/{i}" for i in range(NUM_PROMPTS) if i % 7 == 4 and i % 3 != 1}
    assert wrong.isdisjoint(name for step in played.trained for name in step)
    assert played.lines[-1]["buffer/filtered/middle_level"] == len(wrong)


def test_a_filter_that_raises_ends_the_run_with_its_name_and_the_group_which_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(BaseException) as caught:
        Played(algorithm={"group_filter": f"{__name__}.broken"}, path=tmp_path / "run")
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GroupFilterError)
    assert f"{__name__}.broken raised KeyError: 'nowhere' (group " in str(error)
    (line,) = (tmp_path / "run/trajectories/groups_00000.jsonl").read_text().splitlines()
    assert (json.loads(line)["status"], json.loads(line)["reason"]) == ("filtered", "group_filter_failed")
