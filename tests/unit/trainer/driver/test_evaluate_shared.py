"""An evaluation that all live replicas share: real rollout workers around engines that answer by seed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.fleet.scheduler import NoReplica
from rollout.reward.call import RewardResult
from rollout.worker.worker import RolloutWorker, WorkerSpec
from tests.fakes.engine_client import FakeEngine
from tests.fakes.scripted_run import config, held_out
from tests.fakes.trajectories import make_chunk
from tests.fakes.virtual_time import run_virtual
from trainer.driver.evaluation import EvaluationFailed, Evaluator, deal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.types import Prompt, SamplingParams
    from trainer.driver.checkpointing import Evaluation

SAMPLES = 3
VERSION = 4


class Numbers:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


async def score(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=float((int(text.split()[0]) + len(prompt.text)) % 2))


class BySeed(FakeEngine):
    """Its token is its seed."""

    async def stream_group(self, request_ids: Any, token_ids: Any, params: Any) -> Any:
        async for index, chunk in super().stream_group(request_ids, token_ids, params):
            tokens = np.full(len(chunk.token_ids), params[index].seed % 997, np.int32)
            yield (
                index,
                make_chunk(tokens, [(self.version, len(tokens))], finish_reason=chunk.finish_reason),
            )


class Fleet:
    """Replicas of one version each, each behind a worker of its own."""

    def __init__(self, *versions: int, **kinds: Any) -> None:
        self.engines = {f"e{i}": BySeed(f"e{i}", version=version, **kinds) for i, version in enumerate(versions)}
        self.frozen: set[str] = set()
        self.asked: dict[str, list[int]] = {}

    def evaluator(self, num_prompts: int = 7) -> Evaluator:
        cfg = config(trainer={"eval_samples": SAMPLES, "eval_temperature": 1.0})
        return Evaluator(
            cfg,
            held_out(cfg, num_prompts),
            freeze=self.freeze,
            generate=self.generate,
            members=lambda: dict.fromkeys(self.engines, "live"),
        )

    @contextlib.asynccontextmanager
    async def freeze(self, names: Any) -> AsyncIterator[dict[str, int]]:
        self.frozen = set(names)
        yield {name: self.engines[name].version for name in names}
        self.frozen = set()

    async def generate(self, prompts: Any, params: SamplingParams, name: str, numbers: Any) -> Any:
        assert name in self.frozen
        self.asked[name] = list(numbers)
        spec = WorkerSpec(group_size=1, sampling=params, request_timeout_s=60.0, seed=1, evaluation_window=2)
        engines: Any = list(self.engines.values())
        worker = RolloutWorker(spec, engines, tokenizer=Numbers(), score=score, clock=asyncio.get_running_loop().time)
        return await worker.evaluate(prompts, params, engine=name, numbers=numbers)


def shared(fleet: Fleet, **how: Any) -> tuple[Evaluation, float]:
    async def main() -> tuple[Evaluation, float]:
        result = await fleet.evaluator(**how).run(asyncio.Event(), is_shared=True)
        return result.summary, asyncio.get_running_loop().time()

    return run_virtual(main())


def test_any_number_of_replicas_gives_the_same_numbers_sooner() -> None:
    alone, alone_s = shared(Fleet(VERSION))
    assert alone.version == VERSION and 0 < alone.accuracy < 1
    for num_replicas in (2, 3, 5):
        fleet = Fleet(*[VERSION] * num_replicas)
        result, seconds = shared(fleet)
        assert (result.accuracy, result.pass_at, result.tokens_mean) == (
            alone.accuracy,
            alone.pass_at,
            alone.tokens_mean,
        )
        assert set(fleet.asked) == set(fleet.engines)
        assert seconds < 0.7 * alone_s
    few, _ = shared(Fleet(*[VERSION] * 5), num_prompts=2)
    assert few.pass_at == shared(Fleet(VERSION), num_prompts=2)[0].pass_at


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_prompts_are_dealt_in_turn_and_all_answers_to_one_stay_together(num_replicas: int) -> None:
    shares = deal([SAMPLES] * 7, num_replicas)
    assert sorted(number for share in shares for number in share) == list(range(7 * SAMPLES))
    by_prompt = [{number // SAMPLES for number in share} for share in shares]
    assert sum(map(len, by_prompt)) == 7, "a prompt is at one replica"
    assert max(map(len, by_prompt)) - min(map(len, by_prompt)) <= 1


def test_a_replica_that_missed_the_newest_version_takes_no_part() -> None:
    fleet = Fleet(VERSION, VERSION - 1, VERSION)
    result, _ = shared(fleet)
    assert (result.version, set(fleet.asked)) == (VERSION, {"e0", "e2"})
    assert result.accuracy == shared(Fleet(VERSION))[0].accuracy


def test_where_one_replica_is_lost_the_others_do_it_all_again() -> None:
    fleet = Fleet(VERSION, VERSION, VERSION)
    fleet.engines["e1"].die_after_chunks = 3
    result, _ = shared(fleet)
    assert result.accuracy == shared(Fleet(VERSION))[0].accuracy
    assert sorted(fleet.asked["e0"] + fleet.asked["e2"]) == list(range(7 * SAMPLES))


def test_the_loss_of_all_replicas_fails_the_evaluation_with_the_reason() -> None:
    with pytest.raises(EvaluationFailed, match=r"NoReplica: .*was killed") as caught:
        shared(Fleet(VERSION, VERSION, die_after_chunks=3))
    assert isinstance(caught.value.__cause__, NoReplica)
