"""The staleness promise, over random worlds: the four loops of a run around the real buffer, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.buffer.rollout_buffer import RolloutBuffer
from tests.fakes.staleness_oracle import is_kept
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.buffer.test_rollout_buffer import group_of, prompt

if TYPE_CHECKING:
    from rollout.types import Group

MAX_GENERATION_S = 1e5


@dataclass(frozen=True)
class World:
    groups_per_step: int
    max_staleness: int
    num_workers: int = 8
    filter_frac: float = 0.0
    fail_frac: float = 0.0
    tail: float = 1.0
    """Pareto shape of generation times; below 1 the mean is infinite."""
    train_s: float = 1.0
    sync_s: float = 1.0
    supersede_frac: float = 0.0
    opens_frac: float = 1.0
    """Of the waits of the learner: slots are opened."""
    seed: int = 0
    num_steps: int = 12
    unchanged_frac: float = 0.0
    """Of the steps: they change no weight, so they make no version."""
    has_end: bool = False
    """The buffer knows the last step."""


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
    has_end=st.booleans(),
)


@dataclass
class Simulation:
    """The loops of `trainer.driver` in miniature, from `first_step` on. Keeps its own books, and asks an oracle instead
    of the buffer."""

    world: World
    first_step: int = 0
    version: int = 0
    """The newest that was made."""
    fate: Counter[str] = field(default_factory=Counter)
    """How often each prompt has come to an end."""

    def __post_init__(self) -> None:
        world = self.world
        self.rng = random.Random(world.seed + self.first_step)
        self.sizes: dict[str, Any] = {"groups_per_step": world.groups_per_step, "max_staleness": world.max_staleness}
        self.end_step = self.first_step + world.num_steps
        self.buffer = RolloutBuffer(
            **self.sizes,
            max_retries=2,
            max_filtered_batches_per_step=1000,
            step=self.first_step,
            version=self.version,
            end_step=self.end_step if world.has_end else None,
        )
        self.live = self.version
        self.start_version: dict[int, int] = {}
        self.ready: set[int] = set()
        self.prompt_of: dict[int, str] = {}
        self.trained: list[tuple[int, list[Group]]] = []
        self.possible_since: float | None = None
        self.taking: int | None = None
        self.last_steps: dict[int, int] = {}
        """Version -> the last step that ended with it, until it is released."""
        self.unreleased: set[int] = set()

    def play(self) -> Simulation:
        """A deadlock raises; ages and waits are asserted inside."""
        run_virtual(self.run())
        return self

    async def run(self) -> None:
        queue: asyncio.Queue[tuple[int, list[Group]]] = asyncio.Queue(1)
        workers = [self.rollout_loop() for _ in range(self.world.num_workers)]
        background = [asyncio.create_task(c) for c in (self.prompt_loop(), self.batch_loop(queue), *workers)]
        train = asyncio.create_task(self.train_loop(queue))
        done, _ = await asyncio.wait([train, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for task in done:
            task.result()
        assert train in done, "a background loop ended early"

    async def prompt_loop(self) -> None:
        index = len(self.fate)
        while True:
            await self.buffer.wait_for_slot()
            item = self.buffer.readmit()
            if item is None:
                item = self.buffer.admit(prompt(f"p{index}"))
                index += 1
            self.fate[item.prompt.prompt_id] += 0
            self.start_version[item.group_id] = self.live
            self.prompt_of[item.group_id] = item.prompt.prompt_id
            assert item.start_version == self.live
            self.look()

    async def rollout_loop(self) -> None:
        while True:
            item = await self.buffer.claim()
            await asyncio.sleep(min(self.rng.paretovariate(self.world.tail) - 1.0, MAX_GENERATION_S))
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

    async def batch_loop(self, queue: asyncio.Queue[tuple[int, list[Group]]]) -> None:
        for step in range(self.first_step, self.end_step if self.world.has_end else 10**9):
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
        await asyncio.Event().wait()

    def look(self) -> None:
        """Notes the first moment at which the step that waits could be taken."""
        if self.taking is None or self.possible_since is not None:
            return
        ready = sorted(self.ready, key=lambda group_id: (self.start_version[group_id], group_id))
        chosen = ready[: self.world.groups_per_step]
        behind = [version for group_id, version in self.start_version.items() if group_id not in chosen]
        trains = self.live + len(self.unreleased)  # at most: each step that is not released may have made a version
        assert trains == self.taking or self.world.unchanged_frac
        if len(chosen) == self.world.groups_per_step and is_kept(behind, trains + 1, **self.sizes):
            self.possible_since = asyncio.get_running_loop().time()

    async def train_loop(self, queue: asyncio.Queue[tuple[int, list[Group]]]) -> None:
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
        if self.world.has_end:
            await asyncio.sleep(10 * MAX_GENERATION_S)

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

    def check_books(self) -> None:
        """Every prompt came to an end or is owed, once; and nothing was generated in vain if the end was known."""
        stats = self.buffer.stats()
        assert [step for step, _ in self.trained] == list(range(self.first_step, self.end_step))
        assert all(len(groups) == self.world.groups_per_step for _, groups in self.trained)
        assert stats.discarded_tokens == 0 and stats.num_slots_used <= stats.num_slots
        owed = Counter(entry["prompt_id"] for entry in self.buffer.state_dict(self.end_step)["prompts"])
        assert set(owed.values()) <= {1}
        assert all(self.fate[prompt_id] + owed[prompt_id] == 1 for prompt_id in self.fate)
        if self.world.has_end:
            assert stats.num_slots_used == 0
            assert stats.finished == stats.trained == self.end_step * self.world.groups_per_step


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_no_group_is_too_old_none_is_discarded_and_no_take_waits_longer_than_it_must(world: World) -> None:
    simulation = Simulation(world).play()
    simulation.check_books()
    stats = simulation.buffer.stats()
    if world.has_end:
        assert stats.admitted == 12 * world.groups_per_step + stats.replaced, "what led nowhere was replaced, no more"


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(1, 11))
def test_a_resumed_run_keeps_the_promise_and_loses_no_prompt(world: World, stop_at: int) -> None:
    """Killed after step `stop_at`; the second life starts from the checkpoint with other timings, and maybe an end."""
    first = Simulation(replace(world, num_steps=stop_at, has_end=False)).play()
    second = Simulation(world, first_step=stop_at, version=first.version, fate=first.fate)
    second.buffer.load_state_dict(first.buffer.state_dict(stop_at), prompt)
    second.play().check_books()


def test_synchronous_mode_trains_the_same_groups_whatever_the_timing() -> None:
    """S=0: which prompts a step trains depends on what is filtered, not on who is faster."""
    for seed in (1, 2):
        trained = Simulation(World(groups_per_step=3, max_staleness=0, seed=seed)).play().trained
        assert [[g.prompt_id for g in gs] for _, gs in trained] == [
            [f"p{3 * s + i}" for i in range(3)] for s in range(12)
        ]
