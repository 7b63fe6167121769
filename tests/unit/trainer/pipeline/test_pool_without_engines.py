"""What becomes of a group when its rollout worker has no engine left to send it to."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from rollout.buffer.items import WorkItem
from rollout.engine.router import NoReplica
from rollout.types import Prompt
from tests.fakes.virtual_time import run_virtual
from trainer.pipeline.workers import WorkerPool

ITEM = WorkItem(
    group_id=3, prompt=Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer=""), start_version=0
)


class Ref:
    def __init__(self, answer: object) -> None:
        self._future: Future[object] = Future()
        if isinstance(answer, Exception):
            self._future.set_exception(answer)
        else:
            self._future.set_result(answer)

    def future(self) -> Future[object]:
        return self._future


class Worker:
    """Has no engine for its first `num_failures` calls."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.items: list[WorkItem] = []

    @property
    def run_group(self) -> Worker:
        return self

    def remote(self, item: WorkItem) -> Ref:
        self.items.append(item)
        is_lost = len(self.items) <= self.num_failures
        return Ref(NoReplica("all 1 engine replicas are quarantined") if is_lost else "group")


def test_a_group_waits_for_an_engine_and_begins_anew_as_it_was() -> None:
    worker, waits = Worker(num_failures=3), list[Exception]()

    async def await_engine(error: Exception) -> None:
        waits.append(error)
        await asyncio.sleep(100.0)

    async def main() -> None:
        pool = WorkerPool([worker], group_timeout_s=10.0, await_engine=await_engine)
        result: Any = await pool.run_group(ITEM)
        assert result == "group"
        assert asyncio.get_running_loop().time() == pytest.approx(300.0)
        assert pool._workers[0].num_groups == 0

    run_virtual(main())
    assert worker.items == [ITEM] * 4
    assert len(waits) == 3


def test_a_group_fails_with_the_reasons_where_no_engine_comes_back() -> None:
    async def main() -> None:
        await WorkerPool([Worker(num_failures=9)], group_timeout_s=10.0).run_group(ITEM)

    with pytest.raises(NoReplica, match="all 1 engine replicas are quarantined"):
        run_virtual(main())
