"""`mode=sync`, and `mode=colocated` with S = 0, are the plain synchronous loop: generate, reward, train, sync, repeat.

The plain loop is one function without buffer, tasks or rollout worker. It asks the engine for one response at a time,
while the run generates all responses of a step together. Both end with the same tokens, metrics and weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.types import Group, Prompt, SamplingParams, Trajectory
from rollout.worker.worker import derive_seed
from tests.fakes.trainer_process import ROOT, TrainerProcess
from tests.fakes.trajectories import make_turn
from trainer.builtin.tiny_model import build_tokenizer, ensure_model
from trainer.config.compose import load_config
from trainer.data.build import build_train_batch
from trainer.driver import actors as compose
from trainer.driver.actors import start_actors
from trainer.driver.cluster import Cluster
from trainer.driver.datasets import make_source
from trainer.driver.preflight import PreflightResult, preflight
from trainer.telemetry.trace import Tracer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainer.config.schema import RunConfig

STEPS, GROUPS, SAMPLES = 3, 8, 4
OVERRIDES = (
    "device=cpu",
    "learner.num_ranks=1",
    "seed=5",
    f"trainer.total_steps={STEPS}",
    f"trainer.groups_per_step={GROUPS}",
    f"rollout.group_size={SAMPLES}",
    "rollout.stream_interval=2",
    "trainer.eval_at_start=false",
    "trainer.eval_at_end=false",
    "trainer.eval_every=0",
    "trainer.stop_at_accuracy=null",
    "checkpoint.every_steps=0",
)

pytestmark = pytest.mark.timeout(900)


@dataclass(slots=True)
class Story:
    """What is to be equal."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(group, sample) -> prompt and response."""
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """Of the response, rounded as the file has them; their last bits show in the learner's metrics."""
    rewards: dict[tuple[int, int], float] = field(default_factory=dict)
    versions: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    """By step: everything the learner computed, and the mean reward; no times."""
    weights: str = ""
    """SHA-256 of the exported model."""


async def plain_loop(cfg: RunConfig, checked: PreflightResult, actors: compose.Actors, story: Story) -> None:
    """Synchronous RL as a textbook has it."""
    source = make_source(cfg, checked.inputs.train, None)
    coordinator = compose.make_coordinator(cfg, actors)
    (engine,) = actors.engines.values()
    await coordinator.open()
    await coordinator.publish(0)
    await coordinator.sync(0)
    for step in range(STEPS):
        groups: list[Group] = []
        for group_id in range(step * GROUPS, (step + 1) * GROUPS):
            prompt = source.next()
            responses = [await one_response(cfg, engine, prompt, (group_id, i)) for i in range(SAMPLES)]
            groups.append(
                Group(group_id=group_id, prompt_id=prompt.prompt_id, trajectories=responses, start_version=step)
            )
        batch = build_train_batch(
            groups,
            step=step,
            algorithm=cfg.algorithm,
            num_ranks=cfg.learner.num_ranks,
            max_tokens_per_micro_batch=actors.learner.max_tokens_per_micro_batch,
            max_response_tokens=cfg.rollout.max_response_tokens,
        )
        result = await actors.learner.train_step(batch, version=step)
        await coordinator.publish(step + 1)
        await coordinator.sync(step + 1)
        metrics = {name if "/" in name else f"learner/{name}": one.mean for name, one in result.metrics.items()}
        remember(story, groups, metrics)
    await coordinator.close()


async def one_response(cfg: RunConfig, engine: Any, prompt: Prompt, place: tuple[int, int]) -> Trajectory:
    """Response number `place[1]` of group `place[0]`, alone in the engine, scored."""
    group_id, sample = place
    params = SamplingParams(
        max_tokens=cfg.rollout.max_response_tokens,
        temperature=cfg.rollout.temperature,
        seed=derive_seed(cfg.seed, prompt.prompt_id, group_id, sample, 0),
    )
    stream = engine.generate_group.remote([f"plain/{group_id}/{sample}"], [prompt.token_ids], [params])
    chunks = [chunk async for ref in stream for _, chunk in await ref]
    response = np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int32)
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
    (version,) = {version for chunk in chunks for version in chunk.versions.tolist()}
    turn = make_turn(prompt.token_ids, response, [(version, len(response))], logprobs=logprobs.tolist())
    text = build_tokenizer().decode(response.tolist(), skip_special_tokens=True)
    return Trajectory.of_turns(
        [turn],
        prompt_id=prompt.prompt_id,
        sample_index=sample,
        reward=float(text == prompt.answer),
        reward_parts={},
        status={"stop": "completed", "length": "truncated"}[chunks[-1].finish_reason],  # type: ignore[arg-type]
        timings={},
        text=text,
    )


def remember(story: Story, groups: list[Group], metrics: dict[str, float]) -> None:
    for group in groups:
        for t in group.trajectories:
            key, turn = (group.group_id, t.sample_index), t.turns()[0]
            story.tokens[key] = turn.token_ids.tolist()
            story.logprobs[key] = np.round(turn.logprobs[turn.is_generated].astype(np.float64), 5).tolist()
            story.rewards[key] = t.reward
            story.versions[key] = list(t.policy_versions)
    rewards = np.array([t.reward for group in groups for t in group.trajectories])
    story.metrics.append({**metrics, "reward/mean": float(rewards.mean())})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path) -> Story:
    folder = tmp_path_factory.mktemp("plain")
    story = Story()

    async def whole_life(cfg: RunConfig, checked: PreflightResult) -> None:
        await ensure_model(cfg)
        cluster = await asyncio.to_thread(Cluster.start, cfg, checked.placement, checked.backend)
        try:
            learner, _ = await compose.create_learner(cfg, checked.placement, checked.backend)
            engines = compose.create_engines(cfg, checked.placement, checked.backend, version=0)
            actors = compose.Actors(learner=learner, engines=engines, workers=[])
            try:
                await start_actors(cfg, checked.placement, actors, None, Tracer(None), in_turns=False)
                await plain_loop(cfg, checked, actors, story)
                await actors.learner.export_hf(folder / "export")
            finally:
                await actors.close(timeout_s=30.0)
        finally:
            await asyncio.to_thread(cluster.stop, keep_logs_in=None)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TANDEM_CACHE_DIR", str(tiny_cache)), ("HF_HUB_OFFLINE", "1"), ("PYTHONPATH", str(ROOT))):
            patch.setenv(name, value)
        patch.setenv("_TANDEM_RUN_ID", "")  # set by the cluster, and taken back with the rest
        cfg = load_config(["mode=sync", *OVERRIDES, f"run_dir={folder / 'run'}"])
        checked = preflight(cfg)
        asyncio.run(whole_life(cfg, checked))
    story.weights = digest(folder / "export")
    return story


@pytest.fixture(scope="module", params=["mode=sync", "mode=colocated", "mode=colocated mode.offload=never"])
def pipeline(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path
) -> Iterator[Story]:
    run_dir = tmp_path_factory.mktemp("pipeline") / "run"
    process = TrainerProcess(run_dir, *request.param.split(), *OVERRIDES, cache=tiny_cache)
    try:
        plain = request.getfixturevalue("plain")  # concurrently, since both mostly wait for their processes to start
        assert process.wait(timeout_s=600) == 0, process.text[-4000:]
        yield story_of(process, plain)
    finally:
        process.close()


def story_of(process: TrainerProcess, plain: Story) -> Story:
    """What a run wrote; of its metrics those of the plain loop."""
    story = Story(weights=digest(process.run_dir / "export"))
    for file in sorted((process.run_dir / "trajectories").glob("*.jsonl")):
        for group in map(json.loads, file.read_text().splitlines()):
            if group["start_version"] == STEPS:
                continue  # admitted when the last version went live, and never trained
            for t in group["trajectories"]:
                key, turns = (group["group_id"], t["sample_index"]), t["turns"]
                story.tokens[key] = [token for turn in turns for token in turn["token_ids"]]
                story.logprobs[key] = [value for turn in turns for value in turn["logprobs"]]
                story.rewards[key], story.versions[key] = t["reward"], t["versions"]
    for line in process.lines:
        story.metrics.append({name: value for name, value in line.items() if name in plain.metrics[0]})
    return story


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_plain_loop_is_a_run_that_learns(plain: Story) -> None:
    assert len(plain.tokens) == STEPS * GROUPS * SAMPLES and len(plain.metrics) == STEPS
    assert plain.versions == {key: [key[0] // GROUPS] for key in plain.tokens}
    assert {0.0, 1.0} == set(plain.rewards.values()), "with equal rewards nothing would be learned"
    assert all(metrics["learner/grad_norm"] > 0 for metrics in plain.metrics)


@pytest.mark.parametrize("what", ["tokens", "logprobs", "versions", "rewards", "metrics", "weights"])
def test_a_run_equals_the_plain_loop_in_every_bit(what: str, plain: Story, pipeline: Story) -> None:
    assert getattr(pipeline, what) == getattr(plain, what)
