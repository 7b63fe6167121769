"""What the driver says when somebody does not answer in time, and what it does about the work."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from rollout.reward.process import LOAD_TIMEOUT_S
from rollout.types import Prompt, RolloutRequest
from tests.fakes.local_actor import LocalActor, ServesGroups
from tests.fakes.scripted_run import config
from tests.fakes.virtual_time import run_virtual
from trainer.driver.actors import group_timeout_s, worker_spec
from trainer.driver.fleet import GROUP_GRACE_S, Fleet
from trainer.learner.group import RankHandle
from trainer.remote import EngineReplica, call
from weight_sync.closing import close_parties


class Ref:
    def __init__(self, error: Exception | None = None) -> None:
        self._future: Future[Any] = Future()
        if error is not None:
            self._future.set_exception(error)

    def future(self) -> Future[Any]:
        return self._future


class Silent:
    """An actor that lives and answers nothing."""

    def __init__(self) -> None:
        self.refs: list[Ref] = []

    def __getattr__(self, _method: str) -> Silent:
        return self

    def remote(self, *_args: object) -> Ref:
        self.refs.append(Ref())
        return self.refs[-1]


ITEM = RolloutRequest(
    group_id=3, prompt=Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer=""), start_version=0
)


def test_a_group_without_an_answer_says_why() -> None:
    async def main() -> float:
        fleet = Fleet({}, [Silent()], group_timeout_s=100.0)
        with pytest.raises(TimeoutError, match=r"group 3 timed out after 160 s on rollout worker 0") as caught:
            await fleet.run_group(ITEM)
        assert "rollout.request_timeout_s" in str(caught.value)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(100.0 + GROUP_GRACE_S)


def test_a_worker_that_ran_out_of_time_itself_says_so() -> None:
    class OutOfTime(ServesGroups):
        async def run_group(self, _item: RolloutRequest) -> Any:
            raise TimeoutError("no sample ended")

    with pytest.raises(TimeoutError, match="no sample ended"):
        run_virtual(Fleet({}, [LocalActor(OutOfTime())], group_timeout_s=100.0).run_group(ITEM))


def test_the_worker_has_time_for_everything_it_bounds_itself() -> None:
    """Generation, then the queue of the rewards, the start of a process, and the call."""
    cfg = config(rollout={"request_timeout_s": 50.0})
    spec = worker_spec(cfg)
    assert spec.reward_queue_timeout_s == cfg.task.reward.queue_timeout_s
    bounded_s = spec.request_timeout_s + spec.reward_queue_timeout_s + LOAD_TIMEOUT_S + spec.reward_timeout_s
    assert group_timeout_s(cfg) == bounded_s


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: EngineReplica("replica_1", Silent()).call("ws_pull", timeout_s=1.0), ["replica_1", "ws_pull", "6 s"]),
        (lambda: EngineReplica("replica_1", Silent()).commit(3, "ws_commit", timeout_s=1.0), ["replica_1", "6 s"]),
        (lambda: RankHandle(Silent(), rank=1).call("ws_pack", timeout_s=2.0), ["learner rank 1", "ws_pack", "2 s"]),
    ],
)
def test_weight_sync_names_who_was_silent_how_long_and_what_to_raise(call: Any, words: list[str]) -> None:
    with pytest.raises(TimeoutError) as caught:
        run_virtual(call())
    for word in (*words, "weight_sync.timeout_s"):
        assert word in str(caught.value)


def test_a_learner_that_does_not_answer_names_its_own_key() -> None:
    with pytest.raises(TimeoutError, match=r"save timed out after 2 s on learner rank 0; .*learner\.timeout_s"):
        run_virtual(RankHandle(Silent(), rank=0).call("save", timeout_s=2.0))


def test_a_timeout_inside_an_actor_is_passed_on_as_it_is() -> None:
    with pytest.raises(TimeoutError, match=r"^no sample ended$"):
        run_virtual(call(Ref(TimeoutError("no sample ended")), timeout_s=5.0, who="a", what="b", hint="c"))


def test_a_learner_that_does_not_close_is_known_to_hang() -> None:
    async def main() -> None:
        rank = RankHandle(Silent(), rank=0)
        nobody: Any = None
        await close_parties(nobody, nobody, [], [rank], timeout_s=10.0)
        assert rank.is_broken

    run_virtual(main())
