"""Where things are and what they are called: with `sync_seams.py`, all of the golden net that changes when code moves.

Everything here takes plain values and gives plain values back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import math
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from rich.console import Console

from rollout.agent.loop import MultiTurnLoop, Reply
from rollout.agent.runner import check_trajectory
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.types import Group, Prompt, TokenChunk, Trajectory, Turn
from tests.fakes.learner import (
    KINDS,
    logprobs,
    make_learner,
    pack,
    process_group,
    run_config,
    run_ranks,
    save_tiny,
    sequences,
    weights,
    whole,
)
from tests.fakes.model_7b import QWEN_7B
from tests.fakes.scripted_replica import ScriptedReplica
from tests.fakes.scripted_run import (
    InlineExecutor,
    Script,
    ScriptedDriver,
    ScriptedRun,
    World,
    config,
    forever,
    telemetry_in,
)
from tests.fakes.trainer_process import ROOT
from tests.fakes.trajectories import make_chunk, make_turn
from tests.fakes.virtual_time import run_virtual
from tests.golden.clocks import logged, virtual_clocks
from tests.golden.net import digest, sums
from tests.golden.run_files import json_lines, left_in
from tests.simulation.world import simulation
from trainer.__main__ import main as trainer
from trainer.algorithms.advantages import GroupRewards
from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.algorithm import AlgorithmConfig, ClampConfig, CorrectionConfig, KlConfig, MaskConfig, RejectConfig
from trainer.config.cli import parse
from trainer.config.compose import resolve
from trainer.config.field import type_text
from trainer.config.plain import dump_yaml
from trainer.config.presets import config_names as names_in
from trainer.config.presets import groups as groups_in
from trainer.config.presets import packaged_configs
from trainer.config.schema import all_keys
from trainer.data.build import build_train_batch
from trainer.driver.checkpointing import find_resume_point, log_resumed, prepare_run_dir
from trainer.driver.named_files import file_problems
from trainer.driver.run import EXIT_CODES, _say_goodbye, _summary
from trainer.driver.state import RunState
from trainer.driver.step_metrics import batch_stats
from trainer.errors import ConfigurationError, first_cause, one_line
from trainer.learner.policy import PolicyTrainer
from trainer.tools.advise import main as advise
from trainer.tools.bench import RunOutcome, examine, table
from trainer.tools.bench_figures import BenchPlan
from trainer.tools.bench_workload import parse_case, workload
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.simulation.fleet import Plan
    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch, TrainBatch
    from trainer.learner.step_stats import StepResult

# Configuration


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the configuration."""

    path: str
    kind: str
    """Its type in the words of the documentation."""
    default: Any
    bounds: Mapping[str, float]
    """Any of ge, gt, le, lt."""


def config_keys() -> list[Key]:
    return [
        Key(path=path, kind=type_text(info.hint), default=info.default, bounds=_bounds(info.bounds))
        for path, info in all_keys().items()
        if not info.is_section
    ]


def _bounds(text: str) -> dict[str, float]:
    """Of ">= 0 and < 1"."""
    names = {">=": "ge", ">": "gt", "<=": "le", "<": "lt"}
    return {names[sign]: float(limit) for sign, limit in map(str.split, text.split(" and ") if text else ())}


def config_names() -> Sequence[str]:
    return names_in(packaged_configs())


def config_groups() -> Mapping[str, Sequence[str]]:
    return groups_in([packaged_configs()])


def composed(argv: Sequence[str]) -> dict[str, Any]:
    """What a command line comes to: its exit code, the problems, and the keys that differ from its preset. The line of
    the preset alone has all keys."""
    notes: list[str] = []
    try:
        line = parse(argv)
        config, problems = resolve(line, note=notes.append, check=file_problems)
    except ConfigurationError as error:
        return {"exit": 2, "problems": _told(error.problems)}
    if line.overrides:
        keys, beneath = _flat(asdict(config)), _preset(line.config_dir, line.config_name)
    else:
        keys, beneath = _flat(yaml.safe_load(dump_yaml(config))), {}
    return {
        "exit": 2 if problems else 0,
        **({"problems": _told(problems)} if problems else {}),
        **({"notes": "".join(notes)} if notes else {}),
        **({"action": line.action} if line.action != "run" else {}),
        "config": {key: value for key, value in keys.items() if key not in beneath or beneath[key] != value},
    }


def _told(problems: Sequence[Any]) -> list[list[str]]:
    return sorted([problem.key, str(problem)] for problem in problems)


@cache
def _preset(folder: Path | None, name: str) -> dict[str, Any]:
    config, _ = resolve(parse(["--config-name", name, *(() if folder is None else ("--config-dir", str(folder)))]))
    return _flat(asdict(config))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        is_section = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return flat


def write_inputs(folder: Path) -> None:
    """Files that command lines name: model directories without weights, data, a reward, and configurations."""
    (folder / "model").mkdir()
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "mine.yaml").write_text("defaults: [tiny, _self_]\nname: mine\nlearner: {lr: 0.5}\n")
    (folder / "whole.yaml").write_text("name: whole\nalgorithm: {name: mine, clip_ratio_low: 0.3}\n")
    (folder / "unreadable.yaml").write_text("name: [\n")
    (folder / "data.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (folder / "reward.py").write_text("def score(response, answer):\n    return 1.0\n")


# From groups to batches


def group(given: Mapping[str, Any]) -> Group:
    prompt_id = f"train/{given['group_id']}"
    baseline = given["baseline"]
    return Group(
        group_id=given["group_id"],
        prompt_id=prompt_id,
        trajectories=[_trajectory(prompt_id, answer) for answer in given["answers"]],
        start_version=given["start_version"],
        baseline=None if baseline is None else _trajectory(prompt_id, baseline),
    )


def _trajectory(prompt_id: str, given: Mapping[str, Any]) -> Trajectory:
    return Trajectory.of_turns(
        list(map(_turn, given["turns"])),
        prompt_id=prompt_id,
        sample_index=given["sample"],
        reward=given["reward"],
        reward_parts=given["parts"],
        status=given["status"],
        timings={},
        error="RuntimeError: no judge" if given["status"] == "failed" else "",
    )


def _turn(given: Mapping[str, Any]) -> Turn:
    return make_turn(
        given["context"],
        given["generated"],
        given["segments"],
        logprobs=given["logprobs"],
        reward=given["reward"],
        begins_anew=given["begins_anew"],
    )


def group_stats(groups: Sequence[Mapping[str, Any]], *, step: int) -> dict[str, float]:
    """Metrics of the groups of one step."""
    return batch_stats(list(map(group, groups)), step)


def built_batch(
    groups: Sequence[Mapping[str, Any]], step: int, algorithm: Mapping[str, Any], limits: Mapping[str, int]
) -> dict[str, Any]:
    """Sizes (answers, sequences, tokens, loss tokens, fillers, packing), what is left out, and arrays by name: of every
    micro-batch of every rank, and of what the learner has to know of the groups.

    Raises ValueError as the code does.
    """
    batch = build_train_batch(list(map(group, groups)), step=step, algorithm=_algorithm(algorithm), **limits)
    num_empty = sum(not one.token_ids.any() for rank in batch.micro_batches for one in rank)
    sizes = (batch.num_samples, batch.num_sequences, batch.num_tokens, batch.num_loss_tokens, num_empty)
    return {
        "sizes": [*sizes, batch.balance_frac],
        **({"excluded": dict(batch.excluded)} if batch.excluded else {}),
        "group_rewards": [] if batch.group_rewards is None else [_rewards(one) for one in batch.group_rewards],
        "micro_batches": [[_arrays(one) for one in rank] for rank in batch.micro_batches],
    }


def _algorithm(changes: Mapping[str, Any]) -> AlgorithmConfig:
    kl, correction = KlConfig(**changes.get("kl", {})), changes.get("correction", {})
    sections = {"clamp": ClampConfig, "mask": MaskConfig, "reject": RejectConfig}
    parts = {name: sections[name](**value) if name in sections else value for name, value in correction.items()}
    return AlgorithmConfig(**{**changes, "kl": kl, "correction": CorrectionConfig(**parts)})


def _rewards(rewards: GroupRewards) -> dict[str, Any]:
    baseline = {} if rewards.baseline is None else {"baseline": [rewards.baseline]}
    return {"rewards": rewards.rewards_G, "lengths": rewards.lengths_G, **rewards.parts_G, **baseline}


def _arrays(batch: MicroBatch) -> dict[str, Any]:
    names = ("cu_seqlens", "token_ids", "loss_mask", "versions", "advantages", "loss_weights", "behavior_logprobs")
    arrays = {name: getattr(batch, name) for name in names}
    if batch.cov_selected is not None:
        arrays["cov_selected"] = batch.cov_selected
    if batch.token_rewards is not None:
        arrays |= {"answers": batch.response_index, "token_rewards": batch.token_rewards}
    return arrays


# The learner


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A process group of one, and a tiny model for `learner_steps`."""
    with process_group(folder / "store"):
        make_tiny(folder)
        yield


def make_tiny(folder: Path) -> None:
    global TINY_MODEL
    TINY_MODEL = save_tiny(folder / "tiny")


TINY_MODEL: Path | None = None


EPS = 1e-6
"""Of AdamW: large enough that a gradient of rounding errors alone moves nothing."""
SECOND = ("loss", "grad_norm", "critic_loss", "critic_grad_norm")
"""Metrics of a second step that are kept: they follow from the weights after the first."""


def learner_steps(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Two optimizer steps: metrics, sums of the first gradient and of the weights in the end."""
    assert TINY_MODEL is not None
    return _steps(TINY_MODEL, algorithm)


def _steps(model: Path, algorithm: Mapping[str, Any]) -> dict[str, Any]:
    changes, cfg = dict(algorithm), run_config(model, max_grad_norm=5.0, eps=EPS, weight_decay=1.0)
    critic = replace(cfg.critic, shared_backbone=changes.pop("shared_backbone", False), updates_per_step=2)
    learner = make_learner(replace(cfg, algorithm=_algorithm(changes), critic=critic))
    gradient: dict[str, Any] = {}
    _watch(learner, gradient)
    micro_batches, rewards = _learner_input(learner)
    results = [learner.train_step(micro_batches, step=step, **rewards) for step in (2, 3)]
    first, second = ({name: [m.sum, m.count] for name, m in sorted(result.metrics.items())} for result in results)
    trained = weights(learner).values()
    return {
        "metrics": first,
        "second step": {name: second[name] for name in SECOND if name in second},
        "model_flops": results[0].model_flops,
        "gradient": sums(*gradient.values()),
        "matrices": sums(*(weight for weight in trained if weight.ndim > 1)),
        "vectors": sums(*(weight for weight in trained if weight.ndim == 1)),
    }


def _watch(learner: PolicyTrainer, gradient: dict[str, Any]) -> None:
    """Fills `gradient` as the first step is taken."""
    optimizer: Any = learner._optimizers[""]
    take = optimizer.step

    def watching(**how: float) -> None:
        if not gradient:
            found: Any = ((name, param.grad) for name, param in learner.model.named_parameters())
            gradient.update({name: whole(grad) for name, grad in found})
        take(**how)

    optimizer.step = watching


def _learner_input(learner: PolicyTrainer) -> tuple[list[MicroBatch], dict[str, Any]]:
    """Of this rank: micro-batches that older versions sampled, near the policy, some of whose tokens are selected."""
    parts = sequences(8, seed=3)
    rng = np.random.default_rng(5)
    noise = [rng.normal(0, 0.3, len(part.token_ids)) for part in parts]
    ages = [rng.integers(0, 3, len(part.token_ids)) for part in parts]
    selected = [(rng.random(len(part.token_ids)) < 0.3) & part.loss_mask for part in parts]
    rewards = [np.where(part.loss_mask, rng.normal(0, 0.5, len(part.token_ids)), 0) for part in parts]
    dealt = [list(range(first, first + 2)) for first in range(0, 8, 2)][dist.get_rank() :: dist.get_world_size()]
    micro_batches = []
    for members in dealt:
        packed = pack([parts[number] for number in members])
        mask = packed.loss_mask

        def joined(arrays: list[Any], members: list[int] = members) -> Any:
            return np.concatenate([arrays[number] for number in members])

        near = logprobs(learner, packed) + joined(noise)
        micro_batches.append(
            replace(
                packed,
                behavior_logprobs=np.where(mask, near, 0).astype(np.float32),
                versions=np.where(mask, joined(ages), -1).astype(np.int32),
                cov_selected=joined(selected),
                token_rewards=joined(rewards).astype(np.float32),
                response_index=np.array(members, np.int32),
            )
        )
    return micro_batches, _step_rewards(parts, rewards)


def _step_rewards(parts: Sequence[MicroBatch], rewards: Sequence[Any]) -> dict[str, Any]:
    totals, lengths = np.array([float(r.sum()) for r in rewards]), np.array([int(p.loss_mask.sum()) for p in parts])
    groups = tuple(GroupRewards(rewards_G=totals[at], lengths_G=lengths[at]) for at in (slice(0, 4), slice(4, 8)))
    return {"group_rewards": groups}


def learner_steps_on_ranks(
    algorithms: Sequence[Mapping[str, Any]], folder: Path, *, world_size: int
) -> list[dict[str, Any]]:
    """As `learner_steps`, of rank 0."""
    save_tiny(folder / "tiny")
    return run_ranks(partial(_all_steps, algorithms), folder, world_size=world_size)[0]


def _all_steps(algorithms: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    return [_steps(folder / "tiny", algorithm) for algorithm in algorithms]


# Whole runs in virtual time


def small_config(**sections: dict[str, Any]) -> RunConfig:
    return config(**sections)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One scripted run."""

    script: Script
    mode: str = "async"
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    sets: tuple[Any, ...] = ()
    """Held-out sets beside the main one."""
    interrupts: Sequence[float] = ()
    """When Ctrl-C is pressed."""
    watch_fails_s: float = math.inf
    """When the workers are lost."""
    too_old: Sequence[int] = ()
    """Groups that the buffer gives to the learner as if they had begun one version earlier."""


def scripted_run(run: Run, path: Path, *, learner: TinyLearner | None = None) -> dict[str, Any]:
    """What a run leaves in `path`, what it logs, and how it ends. In `virtual_clocks`; with a real `learner` if one is
    given."""
    mode = {} if run.mode == "async" else {"name": run.mode, "max_staleness": int(run.mode != "sync")}
    cfg = config(**{**run.sections, "mode": {**mode, **run.sections.get("mode", {})}})
    state = RunState(started_at=0.0, wall_clock=time.time)
    with logged(path) as lines:
        resumed = find_resume_point(cfg, path / "checkpoints")
        if resumed is not None:
            log_resumed(cfg, resumed)
            state.load_state_dict(resumed.state["run"])
        with telemetry_in(cfg, path, resume_step=state.resumed_from_step) as telemetry:
            telemetry.run_dir.write_config(cfg)
            world = World(run.script) if learner is None else LearningWorld(run.script, learner)
            scripted = ScriptedRun(cfg, world, telemetry, state)
            scripted.further_sets = run.sets
            if resumed is not None:
                prepare_run_dir(cfg, telemetry.run_dir, resumed)
                scripted.buffer.load_state_dict(resumed.state["buffer"], scripted.source.find)
                scripted.source.load_state_dict(resumed.state["source"])
                if learner is not None:
                    learner.load(resumed.path)
            _age(scripted.buffer, run.too_old)
            failure = _driven(scripted, run)
            screen = io.StringIO()
            _say_goodbye(
                Console(file=screen, width=100), state, telemetry.run_dir, max_staleness=cfg.mode.max_staleness
            )
    return {
        "failure": failure,
        "exit": 1 if failure else EXIT_CODES[state.stop_reason or "failed"],
        "goodbye": screen.getvalue().replace(str(path), "RUN").splitlines(),
        "log": lines,
        "events": [f"{at:.6g} {what} {number}" for at, what, number in scripted.world.events],
        **left_in(path),
    }


def _age(buffer: Any, too_old: Sequence[int]) -> None:
    take = buffer.take

    async def aged(step: int) -> list[Group]:
        groups = await take(step)
        return [replace(g, start_version=g.start_version - 1) if g.group_id in too_old else g for g in groups]

    buffer.take = aged


def _driven(scripted: ScriptedRun, run: Run) -> str:
    """Runs it as the driver does; returns what it failed with."""

    async def watch() -> None:
        await asyncio.sleep(run.watch_fails_s if run.watch_fails_s < math.inf else 1e12)
        raise OSError("no worker is left")

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(InlineExecutor(1))
        driver: Any = ScriptedDriver(scripted, watch if run.watch_fails_s < math.inf else forever)
        driver.interrupts = run.interrupts
        await driver.run()

    try:
        with _summary(scripted.cfg, scripted.state, scripted.telemetry.run_dir):
            run_virtual(body())
    except BaseException as error:  # noqa: BLE001 - however it ends
        return one_line(first_cause(error))
    return ""


def simulated(plan: Plan, path: Path, *, keeps_config: bool = False) -> dict[str, Any]:
    """A simulation: which groups each step took, with a digest of their tokens; requests as they were sent to engines;
    what became of all groups and engines. In `virtual_clocks`."""
    takes: list[Any] = []
    sends: list[tuple[Any, ...]] = []
    stream_group: Any = ScriptedReplica.stream_group

    def noting(replica: Any, request_ids: Sequence[str], token_ids: Sequence[Any], params: Any) -> Any:
        for name, tokens, how in zip(request_ids, token_ids, params, strict=True):
            sends.append((replica.name, name, len(tokens), how.max_tokens, how.seed))
        return stream_group(replica, request_ids, token_ids, params)

    with pytest.MonkeyPatch.context() as patch, simulation(plan, path) as run:
        patch.setattr(ScriptedReplica, "stream_group", noting)
        on_taken: Any = run.books.on_taken
        patch.setattr(
            run.books, "on_taken", lambda step, groups: takes.append(_taken(groups)) or on_taken(step, groups)
        )
        logging.disable(logging.ERROR)  # thousands of planned failures
        try:
            run_virtual(run.run())
        finally:
            logging.disable(logging.NOTSET)
        if keeps_config:
            preset, _ = resolve(parse([f"mode={run.cfg.mode.name}"]))
            known = replace(run.cfg, mode=preset.mode, weight_sync=preset.weight_sync, learner=preset.learner)
            run.telemetry.run_dir.write_config(known)
        return {
            "takes": takes,
            "sends": [" ".join(map(str, sent)) for sent in sends[:40]],
            "all sends": [len(sends), hashlib.sha256(repr(sends).encode()).hexdigest()[:12]],
            "fates": dict(sorted(Counter(run.books.fates.values()).items())),
            "lost": dict(sorted(run.fleet.num_lost.items())),
            "restarts": dict(sorted(run.fleet.num_restarts.items())),
            "answers": {name: replica.num_answers for name, replica in run.fleet.replicas.items()},
            "evaluated": [sorted(versions) for versions in run.evaluated],
            **left_in(path),
        }


def _taken(groups: Sequence[Group]) -> list[Any]:
    """Ids, and a digest of samples, tokens and versions."""
    arrays: list[Any] = []
    for one in groups:
        for trajectory in one.trajectories:
            arrays.append([trajectory.sample_index])
            for turn in trajectory.turns():
                arrays += [turn.token_ids, list(map(list, turn.segments))]
    return [[one.group_id for one in groups], digest(*arrays)]


# Stored runs and tools


class TinyLearner(PolicyTrainer):
    """A real one, which a scripted run trains."""

    def __init__(self) -> None:
        assert TINY_MODEL is not None
        device, cfg = torch.device("cpu"), run_config(TINY_MODEL, eps=EPS)
        super().__init__(cfg, device=device, backend=get_backend("cpu"))


class LearningWorld(World):
    """A world whose learner is real."""

    def __init__(self, script: Script, learner: TinyLearner) -> None:
        super().__init__(script)
        self._learner = learner

    async def train_step(self, batch: TrainBatch, *, version: int) -> StepResult:
        planned = await super().train_step(batch, version=version)
        return replace(planned, metrics=self._learner.train_step(batch.micro_batches[0], step=batch.step).metrics)

    async def save(self, path: Path, *, step: int, in_background: bool = False) -> None:
        self._learner.save(path, step=step)
        await super().save(path, step=step, in_background=in_background)


STORED: dict[str, dict[str, Any]] = {
    "algorithm": {"advantage_estimator": "reinforce", "loss": "reinforce"},
    "learner": {"num_ranks": 1, "max_tokens_per_micro_batch": 2048},
    "trainer": {"total_steps": 20, "groups_per_step": 3, "eval_every": 4},
    "model": {"path": "golden/tiny"},
}


def store_learning_run(path: Path, *, num_steps: int) -> None:
    """An interrupted run with a checkpoint of a real learner."""
    run = Run(script=Script(train_s=2.0), sections=STORED, interrupts=(2.6 * num_steps,))
    scripted_run(run, path, learner=TinyLearner())


def store_scripted_run(path: Path, *, num_steps: int, script: Mapping[str, Any]) -> None:
    sections = {"trainer": {"total_steps": num_steps}, "learner": STORED["learner"]}
    scripted_run(Run(script=Script(**script), mode="sync", sections=sections), path)


def loaded(path: Path) -> dict[str, Any]:
    """What a stored run directory says today: its configuration, its checkpoint, and its files."""
    outcome = composed(["--config-dir", str(path), "--config-name", "config"])
    resumed = find_resume_point(config(), path / "checkpoints")
    state = {} if resumed is None else {**resumed.state, "origin": sorted(resumed.state["origin"])}
    answers = [line for file in sorted(path.glob("evaluations/*.jsonl")) for line in json_lines(file)]
    return {"outcome": outcome, "checkpoint": state, "first answer": answers[:1], **left_in(path)}


def gone_on(path: Path) -> dict[str, Any]:
    """The run goes on from its checkpoint; then the weights of its learner."""
    learner = TinyLearner()
    with virtual_clocks():
        record = scripted_run(Run(script=Script(train_s=2.0, seed=4), sections=STORED), path, learner=learner)
    return {**record, "weights": sums(*weights(learner).values())}


def advised(argv: Sequence[str]) -> dict[str, Any]:
    record = _printed(advise, argv)
    return {**record, "out": json.loads("".join(record["out"]) or "null")} if "--json" in argv else record


def planned(argv: Sequence[str]) -> dict[str, Any]:
    return _printed(trainer, argv)


def _printed(main: Any, argv: Sequence[str]) -> dict[str, Any]:
    """Exit code and lines of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    lines = {"out": out.getvalue().splitlines(), "err": err.getvalue().splitlines()}
    return {"exit": code, **lines}


def write_models(folder: Path) -> None:
    """Two model directories without weights."""
    for name, shape in {"small": KINDS["qwen2"](), "large": QWEN_7B}.items():
        shape.save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)


def bench_of(run_dir: Path) -> dict[str, Any]:
    """Figures of a run, and the table."""
    case = parse_case("async:2+2", tensor_parallel_size=1)
    plan = BenchPlan(work=workload("w1", is_tiny=True), case=case, warmup=2, num_steps=6, peak_tflops=100.0)
    outcome = RunOutcome(
        command=(), started_at=-5.0, wall_s=99.0, timeout_s=200.0, exit_code=0, timed_out=False, output=()
    )
    found = examine(run_dir, outcome, plan)
    found["problem"] = found["problem"].replace(f"{run_dir.parent}/", "")
    return {**found, "table": _lines_of({"a": found})}


def bench_table(name: str) -> list[str]:
    """Of published figures."""
    return _lines_of(json.loads((ROOT / "docs" / "data" / f"{name}.json").read_text())["runs"])


def _lines_of(runs: Mapping[str, Any]) -> list[str]:
    return table({name: {"figures": None, "start_up": {}, **run} for name, run in runs.items()}).splitlines()


# Agents


def conversed(
    prompt: Sequence[int],
    answers: Sequence[Mapping[str, Any]],
    replies: Sequence[Mapping[str, Any]],
    *,
    max_turns: int,
    max_tokens: int,
) -> dict[str, Any]:
    """What an agent of several turns asks, and its trajectory. The environment ends it when it has no more to say."""
    asked: list[Any] = []
    said, replied = iter(answers), iter(replies)

    async def generate(token_ids: Any, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        asked.append([token_ids.tolist(), max_tokens, stop])
        answer = next(said)
        return replace(_chunk(answer), finish_reason=answer["finish"])

    class Talking:
        async def step(self, turns: Any) -> Reply:
            reply = next(replied, {"tokens": None, "reward": 1.0})
            return Reply(token_ids=reply["tokens"], reward=reply["reward"])

    given = Prompt(prompt_id="train/0", token_ids=np.array(prompt, np.int32), text="", answer="")
    loop = MultiTurnLoop(lambda _prompt: Talking(), max_turns=max_turns, stop="END")
    trajectory = check_trajectory(run_virtual(loop.run(given, max_tokens, generate)), given, max_tokens=100)
    return {"asked": asked, "status": trajectory.status, "turns": list(map(_plain_turn, trajectory.turns()))}


def kept_by_builder(prompt: Sequence[int], steps: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Turns, and the tokens that an engine would go on from."""
    builder = TrajectoryBuilder(np.array(prompt, np.int32))
    for kind, given in steps:
        match kind:
            case "generated":
                builder.add_generated(_chunk(given))
            case "reward":
                builder.add_reward(given)
            case "context":
                builder.add_context(np.array(given, np.int32))
            case _:
                builder.start_sequence(np.array(given, np.int32))
    return {"turns": list(map(_plain_turn, builder.turns())), "token_ids": builder.token_ids().tolist()}


def _chunk(given: Mapping[str, Any]) -> TokenChunk:
    return make_chunk(given["tokens"], given["segments"], logprobs=given["logprobs"])


def _plain_turn(turn: Turn) -> list[Any]:
    """Context, sampled tokens, their log-probs, [version, tokens], reward, and whether a sequence begins."""
    sampled = turn.is_generated
    arrays = (turn.token_ids[~sampled], turn.token_ids[sampled], turn.logprobs[sampled])
    segments = list(map(list, turn.segments))
    return [*(array.tolist() for array in arrays), segments, turn.reward, turn.begins_anew]
