"""What becomes of a group when its rollout worker has no engine left to send it to."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollout.fleet.scheduler import NoReplica
from rollout.types import Group, Prompt, RolloutRequest
from tests.fakes.local_actor import LocalActor, ServesGroups
from tests.fakes.virtual_time import run_virtual
from trainer.driver.fleet import WorkerPool

ITEM = RolloutRequest(
    group_id=3, prompt=Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer=""), start_version=0
)


class Worker(ServesGroups):
    """Has no engine for its first `num_failures` groups."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.items: list[RolloutRequest] = []

    async def run_group(self, item: RolloutRequest) -> Group:
        self.items.append(item)
        if len(self.items) <= self.num_failures:
            raise NoReplica("all 1 engine replicas are quarantined")
        return Group(group_id=item.group_id, prompt=item.prompt, trajectories=[], start_version=0)


def test_a_group_waits_for_an_engine_and_begins_anew_as_it_was() -> None:
    worker, waits = Worker(num_failures=3), list[Exception]()

    async def await_engine(error: Exception) -> None:
        waits.append(error)
        await asyncio.sleep(100.0)

    async def main() -> None:
        pool = WorkerPool([LocalActor(worker)], group_timeout_s=10.0, await_engine=await_engine)
        assert (await pool.run_group(ITEM)).group_id == ITEM.group_id
        assert asyncio.get_running_loop().time() == pytest.approx(300.0)
        assert pool._workers[0].num_groups == 0

    run_virtual(main())
    assert worker.items == [ITEM] * 4
    assert len(waits) == 3


def test_a_group_fails_with_the_reasons_where_no_engine_comes_back() -> None:
    async def main() -> None:
        await WorkerPool([LocalActor(Worker(num_failures=9))], group_timeout_s=10.0).run_group(ITEM)

    with pytest.raises(NoReplica, match="all 1 engine replicas are quarantined"):
        run_virtual(main())
