"""The learner seen from the driver, against actors that respond by hand; where ranks meet; warnings that travel."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from tests.fakes.learner import without_loss
from tests.fakes.local_actor import LocalActor
from tests.fakes.ports import free_port
from trainer.data.batch import TrainBatch
from trainer.errors import CheckpointError, LearnerError, first_cause, one_line
from trainer.learner.actor import SetupReport, captured_warnings, check_shared
from trainer.learner.flops import ModelFlops
from trainer.learner.fsdp import open_store
from trainer.learner.group import LearnerGroup
from trainer.learner.step_stats import StepResult

EMPTY = TrainBatch(step=3, micro_batches=((), ()), num_samples=0, num_sequences=0, num_tokens=0, num_loss_tokens=0)


class Late:
    """An exception that is reported a moment later."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Rank:
    """Responds to each method with a value, an exception, or never ("hang")."""

    def __init__(self, **responses: object) -> None:
        self._responses = responses
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        async def respond(*args: object) -> object:
            self.calls.append((name, args))
            response = self._responses.get(name)
            if isinstance(response, Late):
                await asyncio.sleep(0.2)
                raise response.error
            if isinstance(response, BaseException):
                raise response
            if response == "hang":
                await asyncio.Event().wait()
            return response

        return respond


def group_of(*ranks: Rank, timeout_s: float = 1.0, **how: Any) -> LearnerGroup:
    return LearnerGroup([LocalActor(rank) for rank in ranks], timeout_s=timeout_s, **how)


async def test_all_ranks_meet_at_the_address_of_rank_0() -> None:
    flops = ModelFlops(per_token=6.0, per_loss_token=0.0, per_squared_length=2.0)
    ready = SetupReport(
        seconds={}, warnings=(), flops=flops, max_tokens_per_micro_batch=64, shares_prefix=True, description=""
    )
    ranks = [Rank(node_address=("10.0.0.1", 77), setup=ready), Rank(setup=ready)]
    group = group_of(*ranks)
    await group.setup()
    assert (group.flops, group.max_tokens_per_micro_batch, group.shares_prefix) == (flops, 64, True)
    assert ranks[0].calls == [("node_address", ()), ("setup", (("10.0.0.1", 77), None))]
    assert ranks[1].calls == [("setup", (("10.0.0.1", 77), None))]


RESET, SILENCE = RuntimeError("connection reset by peer"), TimeoutError("no response from a peer")


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        (["hang", RuntimeError("disk full")], LearnerError, "learner rank 1 failed in save: RuntimeError: disk full"),
        ([None, "hang"], LearnerError, "save timed out after 0.5 s on learner rank 1; it hangs, or increase learner"),
        # Peers whose connections broke may be reported first.
        ([RESET, Late(ActorDiedError())], LearnerError, "learner rank 1 died in save: ActorDiedError: The actor died"),
        ([RESET, Late(OutOfMemoryError("no room"))], LearnerError, "rank 1 died in save: OutOfMemoryError: no room"),
        ([RESET, Late(TimeoutError("/nfs/step_7"))], LearnerError, "rank 1 failed in save: TimeoutError: /nfs/step_7"),
        # Our own errors keep their type and win over death, which wins over silence.
        ([RESET, CheckpointError("shard is gone")], CheckpointError, "learner rank 1: shard is gone"),
        ([SILENCE, ActorDiedError(), CheckpointError("disk full")], CheckpointError, "learner rank 2: disk full"),
        ([SILENCE, ActorDiedError()], LearnerError, "learner rank 1 died in save"),
    ],
)
async def test_the_first_cause_ends_the_call_and_names_its_rank(
    ranks: list[Any], kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.learner.group.PEERS_S", 0.3)
    async with asyncio.timeout(20.0):
        with pytest.raises(kind) as caught:
            await group_of(*(Rank(save=one) for one in ranks), timeout_s=0.5).save(Path("/x"), step=1)
    reported = one_line(first_cause(ExceptionGroup("training failed", [caught.value])))
    assert reported.startswith(kind.__name__) and words in reported


async def test_a_failed_call_or_a_silent_or_dead_rank_breaks_the_group_and_a_refusal_does_not() -> None:
    async def called(response: object, *, alone: bool) -> bool:
        group = group_of(Rank(), Rank(save=response), timeout_s=0.05)
        call = group.ranks[1].call("save", timeout_s=0.05) if alone else group.save(Path("/x"), step=1)
        await asyncio.gather(call, return_exceptions=True)
        return group.is_broken

    assert not await called(None, alone=False)
    assert await called(CheckpointError("disk full"), alone=False)
    assert not await called(ValueError("no slot is free"), alone=True)
    assert await called("hang", alone=True)
    assert await called(ActorDiedError(), alone=True)


async def test_a_batch_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(LearnerError, match="split for 2 ranks, the group has 1"):
        await group_of(Rank()).train_step(EMPTY, version=2)


async def test_neighbouring_ranks_share_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.learner.group.ray.put", lambda part: part)
    parts = ((without_loss(),), (without_loss(), without_loss()))
    ranks = [Rank(train_step=StepResult(step=3, metrics={}, seconds={})) for _ in range(4)]
    group = group_of(*ranks, ranks_per_batch=2)
    await group.train_step(replace(EMPTY, micro_batches=parts), version=2)
    assert [rank.calls[0][1][0] for rank in ranks] == [parts[0], parts[0], parts[1], parts[1]]
    with pytest.raises(LearnerError, match="split for 1 ranks, the group has 4, of which 2 share a micro-batch"):
        await group.train_step(replace(EMPTY, micro_batches=parts[:1]), version=2)


@pytest.mark.parametrize(("peaks", "peak"), [((1e12, 3e12), 4e12), ((1e12, None), None), ((None, None), None)])
async def test_each_rank_gets_its_micro_batches_and_all_rewards_and_results_are_joined(
    peaks: tuple[float | None, float | None], peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.learner.group.ray.put", lambda part: ("stored", part))
    results = [
        StepResult(
            step=3,
            metrics={},
            seconds={"step": seconds, "forward": seconds / 4, "backward": seconds / 2},
            model_flops=flops,
            peak_flops=of_rank,
        )
        for seconds, flops, of_rank in zip((1.0, 2.0), (2.0, 5.0), peaks, strict=True)
    ]
    ranks = [Rank(train_step=result) for result in results]
    batch = replace(EMPTY, updates=((0, 2), (2, 3)), group_rewards=())
    result = await group_of(*ranks).train_step(batch, version=2)
    assert [rank.calls for rank in ranks] == [[("train_step", (("stored", ()), 3, ((0, 2), (2, 3)), 2, ()))]] * 2
    assert result.seconds == {"step": 2.0, "forward": 0.5, "backward": 1.0}, "of the slowest rank"
    assert result.time_imbalance == 1.5 / 1.125, "of forward and backward: over the mean of all ranks"
    assert (result.model_flops, result.peak_flops) == (7.0, peak), "sums, known only if each is"


class Node:
    """A rank whose host has the given directory in place of the driver's."""

    def __init__(self, rank: int, *, directory: Path) -> None:
        self._rank, self._directory = rank, directory

    async def check_directory(self, folder: str) -> None:
        check_shared(self._directory / Path(folder).name, rank=self._rank, timeout_s=0.2)


async def test_ranks_that_do_not_see_what_the_driver_writes_are_refused_before_they_train(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    for path in (shared, other):
        path.mkdir()
    ranks = [LocalActor(Node(0, directory=shared)), LocalActor(Node(1, directory=shared))]
    await LearnerGroup(ranks, timeout_s=5.0).check_directory(shared)
    ranks[1] = LocalActor(Node(1, directory=other))
    with pytest.raises(CheckpointError, match=r"learner rank 1: .*other on .* is not the driver's directory; .* share"):
        await LearnerGroup(ranks, timeout_s=5.0).check_directory(shared)
    assert not [*shared.iterdir()], "nothing is left"


def test_only_our_own_warnings_of_the_block_are_kept() -> None:
    own, other = logging.getLogger("trainer.learner.packed_inputs"), logging.getLogger("transformers")
    with captured_warnings() as kept:
        own.warning("no kernel for %s", "npu")
        own.info("ready")
        other.warning("deprecated")
    own.warning("too late")
    assert [record.getMessage() for record in kept] == ["no kernel for npu"]


def test_ranks_meet_at_the_port_that_was_asked_for() -> None:
    port = free_port()
    first = open_store("127.0.0.1", port, is_master=True, world_size=2, timeout_s=10.0)
    assert first.port == port
    second = open_store("127.0.0.1", port, is_master=False, world_size=2, timeout_s=10.0)
    first.set("greeting", "hello")
    assert second.get("greeting") == b"hello"


def test_a_port_in_use_is_reported_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = re.escape(f"learner.port={port} cannot be bound on 127.0.0.1: ") + ".*or 0 for a free one"
        with pytest.raises(LearnerError, match=expected):
            open_store("127.0.0.1", port, is_master=True, world_size=1, timeout_s=10.0)
