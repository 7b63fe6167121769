"""What one sync cost, from what each party says of it. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from weight_sync.types import ReplicaTimes, SyncReport

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from weight_sync.members import Member, Outcome
    from weight_sync.wire import PackReport


def sync_report(
    version: int,
    by_replica: Mapping[str, Outcome],
    *,
    packs: Sequence[PackReport],
    members: Collection[Member],
    started: float,
    ended: float,
) -> SyncReport:
    """
    Args:
        by_replica: of the replicas that got the version, at least one.
        packs: of the learner ranks.
        members: all replicas, as they are after the sync.
        started, ended: when it began and ended, on the coordinator's clock.
    """
    outcomes = by_replica.values()
    pulls = [report for outcome in outcomes for report in outcome.reports]
    lived = [m.live_version for m in members if m.state == "live" and m.live_version is not None]
    ranks = {rank for report in pulls for rank in report.pull_by_source}
    counters: Counter[str] = Counter()
    for report in (*packs, *pulls):
        counters.update(report.counters)
    return SyncReport(
        version=version,
        pack_s=max(report.pack_s for report in packs),
        seal_s=max(report.seal_s for report in pulls),
        lease_s=max(report.lease_s for report in pulls),
        pull_s=max(report.pull_s for report in pulls),
        pull_by_source={rank: max(report.pull_by_source.get(rank, 0.0) for report in pulls) for rank in sorted(ranks)},
        pull_bytes_per_s=min((r.nbytes / r.pull_s for r in pulls if r.pull_s > 0), default=0.0),
        attest_s=max(report.attest_s for report in pulls),
        drain_s=max(outcome.drain_s for outcome in outcomes),
        pause_s=max(outcome.pause_s for outcome in outcomes),
        commit_s=max(report.commit_s for report in pulls),
        resume_s=max(outcome.resume_s for outcome in outcomes),
        end_to_end_s=ended - started,
        nbytes=sum(report.nbytes for report in pulls),
        num_runs=sum(report.num_runs for report in pulls),
        num_stalls=sum(report.num_stalls for report in pulls),
        num_retries=sum(outcome.num_retries for outcome in outcomes),
        version_lag=version - min(lived, default=version),
        replicas_live=len(outcomes),
        replicas_skipped=len(members) - len(outcomes),
        counters=dict(sorted(counters.items())),
        replicas={name: replica_times(outcome, started=started) for name, outcome in by_replica.items()},
    )


def replica_times(outcome: Outcome, *, started: float) -> ReplicaTimes:
    """`started`: when the sync began, on the coordinator's clock. A pull in place begins with the pause."""
    live_at_s = outcome.live_at - started
    lease_s = max(report.lease_s for report in outcome.reports)
    pull_at_s = outcome.asked_at - started + lease_s if outcome.is_staged else live_at_s - outcome.pause_s
    return ReplicaTimes(
        is_staged=outcome.is_staged,
        pull_at_s=pull_at_s,
        pull_s=max(report.pull_s for report in outcome.reports),
        attest_s=max(report.attest_s for report in outcome.reports),
        live_at_s=live_at_s,
        drain_s=outcome.drain_s,
        pause_s=outcome.pause_s,
    )
