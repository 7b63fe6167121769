"""A gate between admissions and commits: no request may enter an engine while its weights change."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class AdmissionGate:
    """Many requests pass an open gate at once; `closed` waits until nobody is in the passage and holds it shut.

    A request that crosses a commit in the middle of its admission would carry the label and the cache salt of one
    version and the KV of another.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_passing = 0
        self._is_closed = False
        self.num_waiting = 0
        """Requests that stand before the closed gate."""

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Consumes: nothing. Waits for: an open gate. Unblocked by: the end of `closed`."""
        self.num_waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_closed)
                self._num_passing += 1
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_passing -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Consumes: nothing. Waits for: another closer, then an empty passage. Unblocked by: the ends of both."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_passing == 0)
            yield
        finally:
            async with self._changed:
                self._is_closed = False
                self._changed.notify_all()
