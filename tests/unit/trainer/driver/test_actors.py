"""What actors are made of, how they start, what happens to those that do not answer, and how an engine is replaced."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.engine.vllm_config import engine_args
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.consolidation import ConsolidationRule
from rollout.reward.process import LOAD_TIMEOUT_S
from rollout.types import Prompt, RolloutRequest
from tests.fakes.local_actor import LocalActor, ServesGroups
from tests.fakes.scripted_run import config
from tests.fakes.virtual_time import run_virtual
from tests.unit.trainer.learner.test_group import HandActor
from trainer.config.algorithm import ESTIMATORS, KlConfig
from trainer.config.compose import load_config
from trainer.config.schema import LoraConfig
from trainer.driver import actors as compose
from trainer.driver.actors import Actors, engine_spec, for_actors, group_timeout_s, replace_engine, worker_spec
from trainer.driver.checkpointing import find_resume_point
from trainer.driver.fleet import GROUP_GRACE_S, Fleet
from trainer.driver.placement import plan_placement
from trainer.learner import checkpoint
from trainer.learner.actor import SetupReport
from trainer.learner.group import LearnerGroup, RankHandle
from trainer.remote import EngineReplica, call
from trainer.telemetry.trace import Tracer
from weight_sync.closing import close_parties
from weight_sync.device.select import build, get_backend


def spec_of(name: str = "replica_0", **sections: dict[str, Any]) -> Any:
    return engine_spec(config(**sections), get_backend("cpu"), name=name, version=3)


def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Kind of an actor -> what each of them is made of, from here on: positional arguments and their keywords."""
    found: dict[str, list[Any]] = {"learner": [], "engine": [], "rollout_worker": []}
    for kind, calls in found.items():
        actor = SimpleNamespace(remote=lambda *args, _calls=calls, **keys: _calls.append((args, keys)))
        monkeypatch.setattr(compose, f"{kind}_actor", lambda actor=actor: SimpleNamespace(options=lambda **_: actor))
    return found


# --- what engines and rollout workers are made of ---


@pytest.mark.parametrize(
    ("sections", "load_format"),
    [
        ({}, "dummy"),
        ({"model": {"lora": LoraConfig(rank=8)}}, None),
        ({"rollout": {"engine_args": {"quantization": "fp8"}}}, None),
        ({"rollout": {"engine_args": {"load_format": "auto"}}}, "auto"),
    ],
)
def test_engines_read_files_only_for_what_no_sync_brings(sections: dict[str, Any], load_format: str | None) -> None:
    assert spec_of(**sections).engine_args.get("load_format") == load_format


def test_engines_draw_from_the_seed_of_the_run_and_each_its_own_numbers() -> None:
    names = ("replica_0", "replica_1", "replica_0_restart_1")
    seeds = [spec_of(name).seed for name in names]
    assert len(set(seeds)) == 3
    assert seeds == [spec_of(name).seed for name in names]
    other = engine_spec(replace(config(), seed=1), get_backend("cpu"), name="replica_0", version=0)
    assert other.seed not in seeds


@pytest.mark.parametrize(
    ("staleness", "wanted", "seeded"), [(0, None, True), (1, None, False), (0, False, False), (1, True, True)]
)
def test_requests_are_seeded_where_a_run_can_repeat_itself(staleness: int, wanted: bool | None, seeded: bool) -> None:
    cfg = config(mode={"max_staleness": staleness}, rollout={"per_request_seed": wanted})
    assert worker_spec(cfg).per_request_seed is seeded


def test_workers_begin_with_different_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = made(monkeypatch)["rollout_worker"]
    cfg = config(rollout={"num_workers": 2, "num_replicas": 4})
    placement, engines = plan_placement(cfg, resource=None), {f"replica_{i}": f"actor {i}" for i in range(4)}
    compose.with_workers(cfg, placement, Actors(learner=None, engines=engines, workers=[]))  # type: ignore[arg-type]
    compose.new_worker(cfg, placement, engines, index=1, restart="_restart_1")
    first, second, again = (list(given[1]) for given, _ in calls)
    assert (first[0], second[0]) == ("replica_0", "replica_2")
    assert again == second, "one that is restarted goes where its predecessor went"


@pytest.mark.parametrize(
    ("rollout", "reports"), [({}, False), ({"engine_stats": True}, True), ({"concurrency": "adaptive"}, True)]
)
def test_engines_report_their_load_where_it_is_used(rollout: dict[str, Any], reports: bool) -> None:
    assert spec_of(rollout=rollout).reports_load is reports


def test_stops_reach_the_engines_and_the_workers() -> None:
    rollout = {"stop_token_ids": [7], "stop": ["</s>"]}
    assert spec_of(rollout=rollout).stop_token_ids == (7,)
    assert worker_spec(config(rollout=rollout)).sampling.stop == ("</s>",)


@pytest.mark.parametrize("trusts", [False, True])
def test_whether_code_of_the_tokenizer_may_run_reaches_the_engines_and_the_workers(trusts: bool) -> None:
    model = {"trust_remote_code": trusts}
    assert spec_of(model=model).trust_remote_code is trusts
    assert engine_args(spec_of(model=model))["trust_remote_code"] is trusts
    assert worker_spec(config(model=model)).trust_remote_code is trusts


@pytest.mark.parametrize(("device", "rank", "level"), [("cpu", 0, 0), ("cuda", 0, 2), ("cuda", 8, 1)])
def test_how_deep_engines_sleep_on_shared_devices(device: str, rank: int, level: int) -> None:
    cfg = config(mode={"name": "colocated"}, model={"lora": LoraConfig(rank=rank)})
    assert compose.sleep_level(cfg, build(device)) == level
    assert compose.sleep_level(config(), build(device)) is None


@pytest.mark.parametrize(("device", "forks"), [("cpu", True), ("cuda", True), ("rocm", False), ("npu", None)])
def test_a_driver_without_the_device_knows_what_an_engine_is_made_of(device: str, forks: bool | None) -> None:
    """Engines are forked where an import touches no device."""
    backend: Any = SimpleNamespace(name=device, capabilities=build(device).capabilities, engine_defaults=dict)
    assert forks is None or engine_spec(config(), backend, name="replica_0", version=0).forks is forks
    if not build(device).is_available():
        assert engine_spec(config(), build(device), name="replica_0", version=0).device == device


@pytest.mark.parametrize(
    ("keys", "bounds", "window"),
    [
        ({}, None, 256),
        ({"max_concurrency": 64}, LimitRange(lowest=64, highest=64), 64),
        ({"max_concurrency": 640, "max_num_seqs": 100}, LimitRange(lowest=640, highest=640), 100),
        ({"max_concurrency": 64, "num_workers": 3}, LimitRange(lowest=21, highest=21), 64),
        ({"concurrency": "adaptive"}, LimitRange(lowest=1, highest=256), 256),
        (
            {"concurrency": "adaptive", "min_concurrency": 16, "num_workers": 2},
            LimitRange(lowest=8, highest=128),
            256,
        ),
        ({"concurrency": "adaptive", "max_concurrency": 100}, LimitRange(lowest=1, highest=100), 100),
    ],
)
def test_each_worker_gets_its_share_of_an_engine_and_an_evaluation_what_it_takes(
    keys: dict[str, Any], bounds: LimitRange | None, window: int
) -> None:
    spec = worker_spec(config(rollout=keys))
    assert (spec.concurrency, spec.evaluation_window) == (bounds, window)


def test_moves_fill_no_engine_beyond_what_it_runs_at_once() -> None:
    spec = worker_spec(config(rollout={"repack_below": 8, "max_num_seqs": 100}))
    assert spec.repacking == ConsolidationRule(below=8, most=100)
    assert worker_spec(config()).repacking is None


@pytest.mark.parametrize("name", ESTIMATORS)
def test_workers_make_a_greedy_baseline_for_the_estimator_that_needs_one_and_for_no_other(name: str) -> None:
    needed = ["algorithm.kl.coef=1", "algorithm.kl.reference_model=builtin:tiny"] if name == "zero" else []
    assert worker_spec(load_config([f"algorithm.advantage_estimator={name}", *needed])).greedy_baseline == (
        name == "remax"
    )


def test_workers_get_the_agent_with_its_arguments_and_its_limit() -> None:
    single = worker_spec(config())
    assert (single.agent, single.agent_args, single.agent_timeout_s) == ("", {}, None)
    spec = worker_spec(config(task={"agent": "my.loop", "agent_args": {"turns": 2}, "agent_timeout_s": 900.0}))
    assert (spec.agent, spec.agent_args, spec.agent_timeout_s) == ("my.loop", {"turns": 2}, 900.0)


async def test_learners_get_the_kind_of_device_that_the_driver_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` on their own node may find another."""
    calls, cfg = made(monkeypatch)["learner"], config(learner={"num_ranks": 1})
    assert cfg.device.name == "auto"
    await compose.create_actors(cfg, plan_placement(cfg, resource=None), get_backend("cpu"), version=0)
    assert [args[0].device.name for args, _ in calls] == ["cpu"]


# --- paths: actors may be started in another directory ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models, a tokenizer, a reward and an agent in it."""
    for name in ("models/policy", "models/critic", "models/teacher", "tokenizer"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "judge.py").write_text("def score(*, prompt, response, answer, metadata):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(reward: str, agent: str, *, models: tuple[str, str, str], tokenizer: str = "") -> Any:
    policy, critic, teacher = models
    task = {"reward": replace(config().task.reward, name=reward), "agent": agent}
    model = {"path": policy, "tokenizer_path": tokenizer}
    return config(model=model, critic={"path": critic}, algorithm={"kl": KlConfig(reference_model=teacher)}, task=task)


async def test_every_kind_of_actor_gets_absolute_paths(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = made(monkeypatch)
    models = ("models/policy", "models/critic", "models/teacher")
    cfg = named("judge.py:score", "agents/loop.py:Loop", models=models, tokenizer="./tokenizer")
    placement = plan_placement(cfg, resource=None)
    await compose.create_actors(cfg, placement, get_backend("cpu"), version=0)
    compose.with_workers(cfg, placement, Actors(learner=None, engines={"replica_0": None}, workers=[]))  # type: ignore[arg-type]
    learner, engine, worker = (calls[kind][0][0][0] for kind in ("learner", "engine", "rollout_worker"))
    policy, tokenizer = str(here / "models/policy"), str(here / "tokenizer")
    assert (learner.model.path, learner.model.tokenizer_path) == (policy, tokenizer)
    assert learner.critic.path == str(here / "models/critic")
    assert learner.algorithm.kl.reference_model == str(here / "models/teacher")
    assert (engine.model, engine.tokenizer) == (policy, tokenizer)
    assert (worker.tokenizer_path, worker.reward) == (tokenizer, f"{here}/judge.py:score")
    assert worker.agent == f"{here}/agents/loop.py:Loop"
    assert worker.reward_directory == str(here), "rows may name rewards too"


@pytest.mark.parametrize("reward", ["math", "my_package.judges.score", "my_package.judges:score"])
def test_what_is_no_path_here_stays_as_it_is(reward: str) -> None:
    cfg = named(reward, "my_package.loops.Loop", models=("org/model", "org/critic", "org/t"))
    assert for_actors(cfg) == cfg


def test_the_built_in_model_is_absolute_before_it_is_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", "cache")
    cfg = for_actors(config(algorithm={"kl": KlConfig(reference_model="builtin:tiny")}))
    assert Path(cfg.model.path).parent == here / "cache"
    assert cfg.algorithm.kl.reference_model == cfg.model.path


def test_learners_get_a_checkpoint_by_its_absolute_path(here: Path) -> None:
    checkpoint.commit(checkpoint.begin(Path("run/checkpoints"), 5), {"run": {"step": 5}})
    found = find_resume_point(config(), Path("run/checkpoints"))
    assert found is not None
    assert found.path == here / "run" / "checkpoints" / "step_5"


# --- the start ---

SILENT = Tracer(None)


def engine(answer: object = None, **startup_s: float) -> HandActor:
    return HandActor(start=startup_s if answer is None else answer)


def set_up(*warnings: str, **seconds: float) -> SetupReport:
    return SetupReport(seconds=seconds, warnings=warnings)


async def start(
    ranks: list[HandActor], engines: list[HandActor], workers: list[HandActor], tracer: Tracer = SILENT, **sections: Any
) -> None:
    ranks[0].answers["node_address"] = ("10.0.0.1", 77)
    for rank in ranks:
        rank.answers.setdefault("setup", set_up(imports=0.0))
    named_engines = {f"replica_{i}": e for i, e in enumerate(engines)}
    actors = Actors(learner=LearnerGroup(ranks, timeout_s=30.0), engines=named_engines, workers=workers)
    await compose.start_actors(config(**sections), actors, None, tracer)


async def test_log_and_trace_show_where_the_time_of_each_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tracer = Tracer(tmp_path / "trace.json")
    ranks = [HandActor(setup=set_up(imports=3.0, model=1.0)), HandActor(setup=set_up(imports=2.0, model=5.0))]
    await start(ranks, [engine(imports=7.0, processes=20.5)], [HandActor()], tracer)
    tracer.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = {event["name"]: event["args"] for event in events if event["ph"] == "b"}
    assert spans == {
        "learner": {"imports": 3.0, "model": 5.0},
        "replica_0": {"imports": 7.0, "processes": 20.5},
        "rollout_worker_0": {},
    }
    assert re.search(r"learner is ready after \d+\.\d s \(imports 3\.0 s, model 5\.0 s\)", caplog.text)
    assert re.search(r"replica_0 is ready after \d+\.\d s \(imports 7\.0 s, processes 20\.5 s\)", caplog.text)


async def test_warnings_of_ranks_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [HandActor(setup=set_up("no such kernel")), HandActor(setup=set_up("no such kernel", "another"))]
    await start(ranks, [engine()], [HandActor()])
    assert [record.getMessage() for record in caplog.records] == ["learner: no such kernel", "learner: another"]


async def test_the_first_failure_ends_the_start_while_others_hang() -> None:
    with pytest.raises(ValueError, match="no memory"):
        await start(
            [HandActor(setup="hang")], [engine("hang"), engine(ValueError("no memory"))], [HandActor(start="hang")]
        )


async def test_a_start_that_takes_too_long_names_its_limit_and_where_actors_printed() -> None:
    with pytest.raises(TimeoutError, match=r"startup_timeout_s=0\.05; .*actor_logs/ \(on a joined cluster: the logs"):
        await start([HandActor()], [engine("hang")], [HandActor()], trainer={"startup_timeout_s": 0.05})


async def test_on_shared_devices_engines_begin_when_the_learner_has_left() -> None:
    order: list[str] = []

    class Noting(HandActor):
        def __getattr__(self, name: str) -> Any:
            order.append(name)
            return super().__getattr__(name)

    await start([Noting()], [Noting(start=engine().answers["start"])], [], mode={"name": "colocated"})
    assert order == ["node_address", "setup", "offload", "start"]


# --- calls that are not answered ---


class Hanging(HandActor):
    """Answers nothing."""

    def __getattr__(self, name: str) -> Any:
        self.answers[name] = "hang"
        return super().__getattr__(name)


REQUEST = RolloutRequest(
    group_id=3, prompt=Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer=""), start_version=0
)


def test_a_group_that_times_out_names_the_keys_to_increase() -> None:
    async def main() -> float:
        fleet = Fleet({}, [Hanging()], group_timeout_s=100.0, heartbeat_timeout_s=120.0)
        with pytest.raises(TimeoutError, match=r"group 3 timed out after 160 s on rollout worker 0") as caught:
            await fleet.run_group(REQUEST)
        assert "rollout.request_timeout_s" in str(caught.value)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(100.0 + GROUP_GRACE_S)


def test_a_timeout_inside_an_actor_is_passed_on_as_it_is() -> None:
    class OutOfTime(ServesGroups):
        async def run_group(self, _item: RolloutRequest) -> Any:
            raise TimeoutError("no sample ended")

    with pytest.raises(TimeoutError, match="no sample ended"):
        run_virtual(
            Fleet({}, [LocalActor(OutOfTime())], group_timeout_s=100.0, heartbeat_timeout_s=120.0).run_group(REQUEST)
        )
    ref: Any = HandActor(start=TimeoutError("no sample ended")).start.remote()
    with pytest.raises(TimeoutError, match=r"^no sample ended$"):
        run_virtual(call(ref, timeout_s=5.0, who="a", what="b", hint="c"))


def test_the_driver_waits_for_everything_that_a_worker_bounds_itself() -> None:
    """Generation (of a whole trajectory with an agent), then the queue of the rewards, the start of a process, and the
    call."""
    cfg = config(rollout={"request_timeout_s": 50.0})
    spec = worker_spec(cfg)
    bounded_s = spec.request_timeout_s + spec.reward_queue_timeout_s + LOAD_TIMEOUT_S + spec.reward_timeout_s
    assert group_timeout_s(cfg) == bounded_s
    agent = replace(cfg, task=replace(cfg.task, agent="my.loop", agent_timeout_s=900.0))
    assert group_timeout_s(agent) - group_timeout_s(cfg) == 850.0


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (
            lambda: EngineReplica("replica_1", Hanging()).call("ws_pull", timeout_s=1.0),
            ["ws_pull timed out after 6 s on replica_1", "weight_sync.timeout_s", "actor_logs/"],
        ),
        (
            lambda: EngineReplica("replica_1", Hanging()).commit(3, "ws_commit", timeout_s=1.0),
            ["ws_commit timed out after 6 s on replica_1", "weight_sync.timeout_s"],
        ),
        (
            lambda: RankHandle(Hanging(), rank=1).call("ws_pack", timeout_s=2.0),
            ["ws_pack timed out after 2 s on learner rank 1", "weight_sync.timeout_s", "actor_logs/"],
        ),
        (
            lambda: RankHandle(Hanging(), rank=0).call("save", timeout_s=2.0),
            ["save timed out after 2 s on learner rank 0", "learner.timeout_s"],
        ),
    ],
)
def test_a_timeout_names_who_was_silent_how_long_and_what_to_increase(begin: Any, words: list[str]) -> None:
    with pytest.raises(TimeoutError) as caught:
        run_virtual(begin())
    for word in words:
        assert word in str(caught.value)


def test_a_learner_that_does_not_close_is_known_to_hang() -> None:
    async def main() -> None:
        rank = RankHandle(Hanging(), rank=0)
        nobody: Any = None
        await close_parties(nobody, nobody, [], [rank], timeout_s=10.0)
        assert rank.is_broken

    run_virtual(main())


# --- a new engine in place of a lost one ---


@pytest.mark.parametrize("fails_at", ["", "start", "join"])
async def test_an_engine_without_weights_is_killed(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    new = HandActor(start=OSError("no") if fails_at == "start" else None)

    async def join(_: object) -> int:
        log.append("join")
        if fails_at == "join":
            raise OSError("no")
        return 7

    monkeypatch.setattr(compose.ray, "kill", lambda actor: log.append("kill new" if actor is new else "kill old"))
    coordinator: Any = SimpleNamespace(join=join)
    engines: dict[str, Any] = {"r0": object()}
    replaced = replace_engine("r0", lambda: new, engines=engines, coordinator=coordinator, timeout_s=5.0)
    if not fails_at:
        assert await replaced == 7
        assert (log, engines) == (["kill old", "join"], {"r0": new})
        return
    with pytest.raises(OSError, match="no"):
        await replaced
    assert log == ["kill old", *(["join"] if fails_at == "join" else []), "kill new"]
