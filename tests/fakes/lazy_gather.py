"""How weights must not be sent: by gathering whole tensors, one collective per parameter, with sends in between.

Both variants are what systems do. `list` gathers the model on every rank before it sends anything, so every rank holds
all of it. `lazy` gathers as it sends and fills buckets by the bytes it has; ranks have different bytes, so they come to
a send at different parameters, and wait for each other in different collectives for ever.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from tests.fakes.sync_world import PARAMS, LocalPublisher, local_tensors
from weight_sync.layout import shard_descs

if TYPE_CHECKING:
    from collections.abc import Iterator

HOW = Literal["list", "lazy"]
BUCKET_BYTES = 100


class Collectives(Protocol):
    """The process group of the learner ranks."""

    def all_gather(self, rank: int, name: str, local: torch.Tensor | None) -> torch.Tensor:
        """The whole tensor, on every rank."""
        ...

    def send(self, rank: int, bucket: int) -> None:
        """Broadcast of a bucket: a collective of all ranks, like any other."""
        ...


class GroupAborted(Exception):
    """The deadline came first."""


class ThreadGroup:
    """Collectives of threads: one completes when every rank has called the same one, as in any process group."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._rounds: dict[str, int] = {}
        self._arrived: dict[str, dict[int, torch.Tensor | None]] = {}
        self._is_aborted = False
        self.waiting: dict[int, str] = {}
        """Rank -> the collective it is in."""

    def all_gather(self, rank: int, name: str, local: torch.Tensor | None) -> torch.Tensor:
        parts = self._meet(rank, f"gather {name}", local)
        return torch.cat([part for _, part in sorted(parts.items()) if part is not None])

    def send(self, rank: int, bucket: int) -> None:
        self._meet(rank, f"send bucket {bucket}", None)

    def abort(self) -> None:
        """Frees every thread that waits."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def _meet(self, rank: int, what: str, local: torch.Tensor | None) -> dict[int, torch.Tensor | None]:
        with self._changed:
            number = self._rounds.get(f"{what} {rank}", 0)
            self._rounds[f"{what} {rank}"] = number + 1
            arrived = self._arrived.setdefault(f"{what} {number}", {})
            arrived[rank] = local
            self.waiting[rank] = what
            self._changed.notify_all()
            while len(arrived) < self._size:
                if self._is_aborted:
                    raise GroupAborted(f"rank {rank} in {what}")
                self._changed.wait(1.0)
            self.waiting.pop(rank, None)
            return arrived


class GatheringPublisher(LocalPublisher):
    """A learner rank with the calls of a good one, which gathers before it packs."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        full: dict[str, torch.Tensor],
        *,
        group: Collectives,
        how: HOW,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(rank, num_ranks, full)
        self._group = group
        self._how = how
        self._bucket_bytes = bucket_bytes

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        shards = local_tensors(self.full, rank=self.rank, num_ranks=self.num_ranks)
        whole = self._gathered(shards)
        tensors = dict(list(whole)) if self._how == "list" else dict(self._sent_in_buckets(whole, shards))
        return self.publisher.publish(version, self._own_rows(tensors), deadline_s=deadline_s)

    def _gathered(self, shards: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for param in PARAMS:
            yield param.name, self._group.all_gather(self.rank, param.name, shards.get(param.name))

    def _sent_in_buckets(
        self, whole: Iterator[tuple[str, torch.Tensor]], shards: dict[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        filled, bucket = 0, 0
        for name, tensor in whole:
            filled += 0 if name not in shards else shards[name].nbytes
            if filled >= self._bucket_bytes:
                self._group.send(self.rank, bucket)
                filled, bucket = 0, bucket + 1
            yield name, tensor
        self._group.send(self.rank, bucket)

    def _own_rows(self, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mine = (shard for shard in shard_descs(PARAMS, num_ranks=self.num_ranks) if shard.rank == self.rank)
        return {s.param: full[s.param][s.row_start : s.row_stop] for s in mine if s.row_stop > s.row_start}
