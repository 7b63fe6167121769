from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.plan.types import PullPlan, Run
from weight_sync.receive.staging import shadow_plan
from weight_sync.transports.base import PIECE_BYTES, pieces

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


@settings(max_examples=200, deadline=None)
@given(runs)
def test_shadow_holds_every_run_and_each_of_its_bytes_once(found: list[Run]) -> None:
    plan = shadow_plan(PullPlan.of(0, found))
    shadow = {}
    for span in plan.ranges:
        for i in range(span.nbytes):
            assert span.shadow_off + i not in shadow, "ranges overlap in the shadow"
            shadow[span.shadow_off + i] = (span.src_rank, span.src_off + i)
    sources = list(shadow.values())
    assert len(set(sources)) == len(sources), "a source byte is pulled twice"
    for run, offset in zip(found, plan.run_offsets, strict=True):
        for i in (0, run.nbytes // 2, run.nbytes - 1):
            assert shadow[offset + i] == (run.src_rank, run.src_off + i)
    assert plan.nbytes == max(shadow, default=-1) + 1


def test_pieces_cover_everything_in_order() -> None:
    total = 2 * PIECE_BYTES + 5
    assert list(pieces(total)) == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES, 5)]
    assert list(pieces(0)) == []
