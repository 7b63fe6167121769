"""The real Ray shell of a rollout worker that a test can kill, and that reports how many groups it is busy with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rollout.worker.actor import RolloutWorkerActor

if TYPE_CHECKING:
    from rollout.types import Group, RolloutRequest


class CountingWorker(RolloutWorkerActor):
    _num_groups = 0

    async def run_group(self, item: RolloutRequest) -> Group:
        self._num_groups += 1
        try:
            return await super().run_group(item)
        finally:
            self._num_groups -= 1

    async def pid(self) -> int:
        return os.getpid()

    async def num_groups(self) -> int:
        return self._num_groups
