"""What a staging buffer holds, and which bytes of a version are not read again because it has them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.sync_world import opened
from weight_sync.plan.types import PullPlan, Run
from weight_sync.receive import staging
from weight_sync.receive.staging import UnchangedRuns, merged_spans, parts_in, staging_layout
from weight_sync.transports.base import PIECE_BYTES, Piece, pieces

runs = st.lists(
    st.builds(
        Run,
        src_rank=st.integers(0, 2),
        src_off=st.integers(0, 20_000),
        dst_param=st.just("w"),
        dst_off=st.just(0),
        nbytes=st.integers(1, 9_000),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(runs)
def test_staging_buffer_holds_every_run_and_each_of_its_bytes_once(found: list[Run]) -> None:
    plan = staging_layout(PullPlan.of(0, found))
    buffer = {}
    for span in plan.ranges:
        for i in range(span.nbytes):
            assert span.staging_off + i not in buffer, "ranges overlap in the staging buffer"
            buffer[span.staging_off + i] = (span.src_rank, span.src_off + i)
    sources = list(buffer.values())
    assert len(set(sources)) == len(sources), "a source byte is pulled twice"
    for run, offset in zip(found, plan.run_offsets, strict=True):
        for i in (0, run.nbytes // 2, run.nbytes - 1):
            assert buffer[offset + i] == (run.src_rank, run.src_off + i)
    assert plan.nbytes == max(buffer, default=-1) + 1


def test_pieces_cover_everything_in_order() -> None:
    total = 2 * PIECE_BYTES + 5
    assert list(pieces(total)) == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES, 5)]
    assert list(pieces(0)) == []


@given(
    runs=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), max_size=6),
    cuts=st.sets(st.integers(1, 99), max_size=6),
)
def test_every_byte_of_a_changed_run_is_read_once_and_pieces_are_reported_when_they_are_whole(
    runs: list[tuple[int, int]], cuts: set[int]
) -> None:
    memory, slot = torch.zeros(100, dtype=torch.uint8), torch.arange(1, 101, dtype=torch.uint8)
    whole = [Piece(a, memory[a:b]) for a, b in pairwise(sorted({0, 100, *cuts}))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging, "SKIP_GAP_BYTES", 2)
        spans = merged_spans(runs)
    reported: list[int] = []
    parts, arrived = parts_in(spans, whole, reported.append)
    expected = [any(a <= at < b for a, b in spans) for at in range(100)]
    for number, part in enumerate(parts, start=1):
        assert not part.dst.any(), "read twice"
        part.dst.copy_(slot[part.src_off : part.src_off + part.dst.numel()])
        arrived(number)
        for piece in whole[: reported[-1]]:
            stop = piece.src_off + piece.dst.numel()
            assert piece.dst.ne(0).tolist() == expected[piece.src_off : stop], "reported before it was there"
    assert memory.ne(0).tolist() == expected
    assert all(memory[a : a + n].all() for a, n in runs)
    assert not parts or reported[-1] == len(whole)


def test_a_source_is_asked_only_where_it_paid_last_time_and_nothing_was_overwritten() -> None:
    far = staging.SKIP_GAP_BYTES * 2
    unchanged, asked = UnchangedRuns({3: [(0, 10), (far, 10)]}), list[str]()

    def ask() -> tuple[int, ...]:
        asked.append("asked")
        return (1, 9)

    assert unchanged.changed(3, ask) is None, "nothing is there yet"
    unchanged.verified(3, (1, 2))
    assert unchanged.changed(3, ask) is None, "nobody knows whether runs ever stay as they are"
    unchanged.verified(3, (1, 3))
    assert unchanged.changed(3, ask) == [(far, far + 10)]
    assert unchanged.changed(3, ask) is None, "the read before was not verified: the buffer may hold anything"
    unchanged.verified(3, (5, 6))
    assert unchanged.changed(3, ask) is None, "every run had changed"
    assert len(asked) == 1


async def test_replicas_that_hand_versions_on_hold_every_version_of_which_a_part_did_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "SKIP_GAP_BYTES", 0)
    async with opened(2, 3, commit="staged") as world:
        others, skipped = world.full, 0
        world.train(1)
        weights = world.full
        for version, name in enumerate([None, None, None, *others, None], start=1):
            weights = weights if name is None else {**weights, name: others[name]}
            for learner in world.publishers:
                learner.full = weights
            await world.coordinator.publish(version)
            report = await world.coordinator.sync(version)
            assert report.num_retries == 0
            skipped += report.skipped_bytes
            for replica in world.replicas:
                replica.assert_holds(weights)
        assert skipped > 0
