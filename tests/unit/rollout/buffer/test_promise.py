"""The staleness promise, over random worlds: the four loops of a run around the real buffer, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.types import Group, Prompt, RolloutRequest
from tests.fakes.staleness_oracle import is_kept
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.buffer.test_rollout_buffer import group_of


@dataclass(frozen=True)
class World:
    groups_per_step: int
    max_staleness: int
    num_workers: int
    filter_frac: float
    fail_frac: float
    tail: float
    """Pareto shape of generation times; below 1 the mean is infinite."""
    train_s: float
    sync_s: float
    supersede_frac: float
    opens_frac: float
    """Of the waits of the learner: it says so, and slots are opened."""
    seed: int
    num_steps: int = 12
    unchanged_frac: float = 0.0
    """Of the steps: they change no weight, so they make no version."""


worlds = st.builds(
    World,
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    num_workers=st.integers(1, 24),
    filter_frac=st.sampled_from([0.0, 0.0, 0.3, 0.7]),
    fail_frac=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    tail=st.sampled_from([0.6, 1.0, 3.0]),
    train_s=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    sync_s=st.sampled_from([0.0, 0.5, 10.0, 60.0]),
    supersede_frac=st.sampled_from([0.0, 0.5]),
    opens_frac=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
    unchanged_frac=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
)


def new_prompt(prompt_id: str) -> Prompt:
    return Prompt(prompt_id=prompt_id, token_ids=np.array([1], np.int32), text="", answer="")


@dataclass
class Simulation:
    """The loops of `trainer.driver` in miniature. Keeps its own books, and asks an oracle instead of the buffer."""

    world: World
    buffer: RolloutBuffer
    rng: random.Random
    first_prompt: int = 0
    start_version: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    prompt_of: dict[int, str] = field(default_factory=dict)
    fate: Counter[str] = field(default_factory=Counter)
    trained: list[tuple[int, list[Group]]] = field(default_factory=list)
    possible_since: float | None = None
    taking: int | None = None
    live: int = 0
    version: int = 0
    """The newest that was made."""
    last_steps: dict[int, int] = field(default_factory=dict)
    """Version -> the last step that ended with it, until it is released."""
    unreleased: set[int] = field(default_factory=set)

    async def run(self, first_step: int = 0, version: int = 0) -> None:
        self.live = self.version = version
        queue: asyncio.Queue[tuple[int, list[Group]]] = asyncio.Queue(1)
        workers = [self.rollout_loop() for _ in range(self.world.num_workers)]
        background = [
            asyncio.create_task(c) for c in (self.prompt_loop(), self.batch_loop(first_step, queue), *workers)
        ]
        train = asyncio.create_task(self.train_loop(first_step, queue))
        done, _ = await asyncio.wait([train, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for task in done:
            task.result()
        assert train in done, "a background loop ended early"

    async def prompt_loop(self) -> None:
        index = self.first_prompt
        while True:
            await self.buffer.wait_for_slot()
            item = self.buffer.readmit()
            if item is None:
                prompt_id = f"p{index}"
                index += 1
                item = self.buffer.admit(new_prompt(prompt_id))
            self.fate[item.prompt.prompt_id] += 0
            self.note(item)

    def note(self, item: RolloutRequest) -> None:
        self.start_version[item.group_id] = self.live
        self.prompt_of[item.group_id] = item.prompt.prompt_id
        assert item.start_version == self.live
        self.look()

    async def rollout_loop(self) -> None:
        while True:
            item = await self.buffer.claim()
            await asyncio.sleep(min(self.rng.paretovariate(self.world.tail) - 1.0, 1e5))
            if self.rng.random() < self.world.fail_frac:
                if self.buffer.fail(item.group_id, RuntimeError("engine died")) == "retried":
                    self.start_version[item.group_id] = self.live
                else:
                    self.leave(item.group_id)
            elif self.rng.random() < self.world.filter_frac:
                self.buffer.filter(item.group_id, "zero_variance")
                self.leave(item.group_id)
            else:
                self.buffer.finish(group_of(item, num_tokens=self.rng.randrange(1, 9)))
                self.ready.add(item.group_id)
            self.look()

    def leave(self, group_id: int) -> None:
        del self.start_version[group_id]
        self.fate[self.prompt_of[group_id]] += 1

    async def batch_loop(self, first_step: int, queue: asyncio.Queue[tuple[int, list[Group]]]) -> None:
        step = first_step
        while True:
            self.taking, self.possible_since = step, None
            self.look()
            groups = await self.buffer.take(step)
            now = asyncio.get_running_loop().time()
            assert self.possible_since == now, f"take waited from {self.possible_since} to {now}"
            self.taking = None
            self.unreleased.add(step)
            for group in groups:
                assert group.start_version == self.start_version.pop(group.group_id)
                self.ready.remove(group.group_id)
            await queue.put((step, groups))
            step += 1

    def look(self) -> None:
        """Notes the first moment at which the step that waits could be taken."""
        if self.taking is None or self.possible_since is not None:
            return
        ready = sorted(self.ready, key=lambda group_id: (self.start_version[group_id], group_id))
        chosen = ready[: self.world.groups_per_step]
        behind = [version for group_id, version in self.start_version.items() if group_id not in chosen]
        limits = {"groups_per_step": self.world.groups_per_step, "max_staleness": self.world.max_staleness}
        trains = self.live + len(self.unreleased)  # at most: each step that is not released may have made a version
        assert trains == self.taking or self.world.unchanged_frac
        if len(chosen) == self.world.groups_per_step and is_kept(behind, trains + 1, **limits):
            self.possible_since = asyncio.get_running_loop().time()

    async def train_loop(self, first_step: int, queue: asyncio.Queue[tuple[int, list[Group]]]) -> None:
        pending: asyncio.Task[None] | None = None
        for _ in range(self.world.num_steps):
            if queue.empty() and self.rng.random() < self.world.opens_frac:
                self.buffer.grow_slots()
            step, groups = await queue.get()
            for group in groups:
                assert 0 <= self.version - group.start_version <= self.world.max_staleness
            await asyncio.sleep(self.world.train_s)
            self.trained.append((step, groups))
            for group in groups:
                self.fate[group.prompt_id] += 1
            is_new = self.rng.random() >= self.world.unchanged_frac
            self.version += is_new
            self.last_steps[self.version] = step
            if is_new:
                pending = asyncio.create_task(self.sync(self.version, pending))
            elif self.live == self.version:
                self.release(self.version)

    async def sync(self, version: int, before: asyncio.Task[None] | None) -> None:
        """Weights land in order, but some are overtaken by newer ones and never land themselves."""
        await asyncio.sleep(self.rng.random() * self.world.sync_s)
        if before is not None:
            await before
        if self.version == version or self.rng.random() >= self.world.supersede_frac:
            self.release(version)

    def release(self, version: int) -> None:
        step = max(self.last_steps.pop(made) for made in sorted(self.last_steps) if made <= version)
        self.buffer.release(step, version=version)
        self.live = version
        self.unreleased = {one for one in self.unreleased if one > step}
        self.look()


def new_buffer(world: World, step: int = 0, version: int = 0) -> RolloutBuffer:
    return RolloutBuffer(
        groups_per_step=world.groups_per_step,
        max_staleness=world.max_staleness,
        max_retries=2,
        max_filtered_batches_per_step=1000,
        step=step,
        version=version,
    )


@settings(max_examples=250, deadline=None)
@given(worlds)
def test_no_group_is_too_old_none_is_discarded_and_no_take_waits_longer_than_it_must(world: World) -> None:
    async def main() -> Simulation:
        simulation = Simulation(world=world, buffer=new_buffer(world), rng=random.Random(world.seed))
        await simulation.run()  # a deadlock raises, ages and waits are asserted inside
        return simulation

    simulation = run_virtual(main())
    stats = simulation.buffer.stats()
    assert [step for step, _ in simulation.trained] == list(range(world.num_steps))
    assert all(len(groups) == world.groups_per_step for _, groups in simulation.trained)
    assert stats.discarded_tokens == 0
    assert stats.num_slots_used <= stats.num_slots
    owed = {entry["prompt_id"] for entry in simulation.buffer.state_dict(world.num_steps)["prompts"]}
    for prompt_id, num_ends in simulation.fate.items():
        assert num_ends + (prompt_id in owed) == 1, prompt_id


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(1, 11))
def test_a_resumed_run_keeps_the_promise_and_loses_no_prompt(world: World, stop_at: int) -> None:
    """Killed after step `stop_at`; the second life starts from the checkpoint with other timings."""

    async def life(
        buffer: RolloutBuffer, first_step: int, version: int, num_steps: int, fate: Counter[str]
    ) -> Simulation:
        shorter = World(**{**vars(world), "num_steps": num_steps})
        rng = random.Random(world.seed + first_step)
        simulation = Simulation(world=shorter, buffer=buffer, rng=rng, fate=fate, first_prompt=len(fate))
        await simulation.run(first_step, version)
        return simulation

    first = run_virtual(life(new_buffer(world), 0, 0, stop_at, Counter()))
    state = first.buffer.state_dict(stop_at)
    resumed = new_buffer(world, stop_at, first.version)
    resumed.load_state_dict(state, new_prompt)
    second = run_virtual(life(resumed, stop_at, first.version, world.num_steps, first.fate))
    assert second.buffer.stats().discarded_tokens == 0
    last = stop_at + world.num_steps
    owed = Counter(entry["prompt_id"] for entry in second.buffer.state_dict(last)["prompts"])
    assert set(owed.values()) <= {1}
    for prompt_id, num_ends in second.fate.items():
        assert num_ends + owed[prompt_id] == 1, prompt_id


def test_synchronous_mode_trains_the_same_groups_whatever_the_timing() -> None:
    """S=0: which prompts a step trains depends on what is filtered, not on who is faster."""

    def trained(seed: int) -> list[list[str]]:
        async def main() -> Simulation:
            world = World(3, 0, 8, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, seed)
            simulation = Simulation(world=world, buffer=new_buffer(world), rng=random.Random(seed))
            await simulation.run()
            return simulation

        return [[group.prompt_id for group in groups] for _, groups in run_virtual(main()).trained]

    assert trained(1) == trained(2) == [[f"p{3 * step + i}" for i in range(3)] for step in range(12)]
