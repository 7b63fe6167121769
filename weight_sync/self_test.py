"""Do the engines hold what the learners packed? Asked of both sides, compared run by run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.errors import DigestMismatch, WeightSyncError
from weight_sync.wire import PublishedDigests, RunDigests, decode, open_reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weight_sync.members import Member
    from weight_sync.opening import EpochOpener
    from weight_sync.types import Manifest


async def compare_with_learners(
    opener: EpochOpener, manifest: Manifest, members: Sequence[Member], *, version: int, timeout_s: float
) -> None:
    """
    Raises:
        DigestMismatch: names replica, worker and parameters that differ.
        WeightSyncError: a worker holds another version.
    """
    answers = await opener.on_publishers("ws_digests", version, timeout_s=timeout_s)
    packed = {d.rank: d.by_worker for d in (decode(answer, PublishedDigests) for answer in answers)}
    for member in members:
        replies = await member.handle.call("ws_digests", timeout_s=timeout_s)
        for worker, reply in enumerate(replies):
            party = f"{member.name}/{worker}"
            live = open_reply(reply, RunDigests, party=party)
            if live.version != version:
                raise WeightSyncError(f"{party} holds version {live.version}, not {version}; sync before the test")
            wrong = _differing_params(manifest, worker, live, packed)
            if wrong:
                raise DigestMismatch(f"{party} differs from the learner in {', '.join(wrong)} at version {version}")


def _differing_params(
    manifest: Manifest, worker: int, live: RunDigests, packed: dict[int, dict[int, tuple[int, ...]]]
) -> list[str]:
    """Engine parameters of which a run does not hold the learner's bytes. Pure."""
    plan = next(plan for plan in manifest.pull if plan.worker == worker)
    wrong: set[str] = set()
    for rank, found in live.by_rank.items():
        names = [run.dst_param for run in plan.runs if run.src_rank == rank]
        expected = packed[rank][worker]
        wrong.update(name for name, a, b in zip(names, found, expected, strict=True) if a != b)
    return sorted(wrong)
