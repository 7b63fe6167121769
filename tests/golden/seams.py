"""Where things are and what they are called: all of the golden net that changes when code moves.

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
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from rich.console import Console

from tests.fakes.learner import (
    KINDS,
    process_group,
    run_config,
    save_tiny,
    weights,
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
from tests.fakes.virtual_time import run_virtual
from tests.golden.clocks import logged, virtual_clocks
from tests.golden.net import digest, sums
from tests.golden.run_files import json_lines, left_in
from tests.simulation.world import simulation
from trainer.__main__ import main as trainer
from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.cli import parse
from trainer.config.compose import resolve
from trainer.config.field import type_text
from trainer.config.plain import dump_yaml
from trainer.config.presets import config_names as names_in
from trainer.config.presets import groups as groups_in
from trainer.config.presets import packaged_configs
from trainer.config.schema import all_keys
from trainer.driver.checkpointing import find_resume_point, log_resumed, prepare_run_dir
from trainer.driver.named_files import file_problems
from trainer.driver.run import EXIT_CODES, _say_goodbye, _summary
from trainer.driver.state import RunState
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

    from rollout.types import Group
    from tests.simulation.fleet import Plan
    from trainer.config.schema import RunConfig
    from trainer.data.batch import TrainBatch
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


# A learner


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A process group of one, and a tiny model for `TinyLearner`."""
    global TINY_MODEL
    with process_group(folder / "store"):
        TINY_MODEL = save_tiny(folder / "tiny")
        yield


TINY_MODEL: Path | None = None


EPS = 1e-6
"""Of AdamW: large enough that a gradient of rounding errors alone moves nothing."""


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
