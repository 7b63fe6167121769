"""What actors are made of, how they start, what happens to those that do not reply, and how an engine is replaced."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from concurrent.futures import Future
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout.engine.vllm_config import engine_args
from rollout.errors import EngineDead
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.consolidation import ConsolidationRule
from rollout.reward.process import LOAD_TIMEOUT_S
from tests.fakes.local_actor import Ref
from tests.fakes.scripted_run import config
from tests.fakes.virtual_time import in_virtual_time, run_virtual
from trainer.config.algorithm import ESTIMATORS, KlConfig
from trainer.config.compose import load_config
from trainer.config.schema import LoraConfig
from trainer.driver import actors as compose
from trainer.driver.actors import Actors, engine_spec, for_actors, group_timeout_s, make_devices, worker_spec
from trainer.driver.checkpointing import find_resume_point
from trainer.driver.placement import plan_placement
from trainer.driver.weight_updates import ColocatedDevices, DedicatedDevices
from trainer.learner import checkpoint
from trainer.learner.actor import SetupReport
from trainer.learner.group import LearnerGroup, RankHandle
from trainer.remote import EngineReplica, call
from trainer.telemetry.trace import Tracer
from weight_sync.control.epoch import EpochOpener, SyncOptions
from weight_sync.device.select import build, get_backend


class HandActor:
    """Responds to each method with a value, an exception, or never ("hang")."""

    def __init__(self, **responses: object) -> None:
        self.responses = responses
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **named: self._respond(name, args, named))

    def _respond(self, name: str, args: tuple[object, ...], named: dict[str, object]) -> Ref:
        self.calls.append((name, (*args, *([named] if named else []))))
        future: Future[object] = Future()
        response = self.responses.get(name)
        if isinstance(response, BaseException):
            future.set_exception(response)
        elif response != "hang":
            future.set_result(response)
        return Ref(future)


def engine_of(cfg: Any, *, name: str = "replica_0", device: Any = None) -> Any:
    return engine_spec(cfg, get_backend("cpu") if device is None else device, name=name, version=3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Kind of an actor -> the positional arguments that each of them is made of."""
    found: dict[str, list[Any]] = {"learner": [], "engine": [], "rollout_worker": []}
    for kind, calls in found.items():
        actor = SimpleNamespace(remote=lambda *args, _calls=calls, **_: (_calls.append(args), HandActor())[1])
        monkeypatch.setattr(compose, f"{kind}_actor", lambda actor=actor: SimpleNamespace(options=lambda **_: actor))
    return found


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize(("device", "vllm_can"), [("cuda", True), ("cuda", False), ("cpu", True)])
async def test_learner_and_engines_round_logits_both_or_not_at_all(
    asked: bool | None, device: str, vllm_can: bool, made: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "has_float32_head", lambda: vllm_can)
    cfg = load_config([])
    cfg = replace(cfg, learner=replace(cfg.learner, fp32_head=asked))
    placement = plan_placement(cfg, resource=None)
    await compose.create_learner(cfg, placement, build(device))
    compose.create_engines(cfg, placement, build(device), version=0)
    expected = device == "cuda" and vllm_can if asked is None else asked
    assert {learner_cfg.learner.fp32_head for (learner_cfg,) in made["learner"]} == {expected}
    assert {spec.float32_head for (spec,) in made["engine"]} == {expected}


@pytest.mark.parametrize("planned", [None, 3 << 29])
async def test_a_start_brings_what_was_not_known_when_the_engine_was_created(planned: int | None) -> None:
    """It measures its cache where none is planned."""
    cfg, actor = config(rollout={"max_num_seqs": 77}), HandActor()
    placement = replace(plan_placement(cfg, resource="GPU"), cache_bytes=planned, engine_devices={"replica_0": ("3",)})
    await compose.start_engine(cfg, placement, actor, name="replica_0_restart_1")
    cache = {} if planned is None else {"kv_cache_gib": 1.5}
    assert actor.calls == [("start", ({"max_num_seqs": 77, "devices": ("3",), **cache},))]


@pytest.mark.parametrize(("device", "calls"), [("cuda", ["begin_imports"]), ("rocm", [])])
def test_an_engine_imports_as_soon_as_it_is_created_where_that_touches_no_device(
    device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, actor = config(), HandActor()
    factory = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_, **_keys: actor))
    monkeypatch.setattr(compose, "engine_actor", lambda: factory)
    made = compose.create_engines(cfg, plan_placement(cfg, resource="GPU"), build(device), version=0)
    assert set(made.values()) == {actor}
    assert [name for name, _ in actor.calls] == calls * len(made)


def without_learner(**engines: Any) -> Any:
    return Actors(learner=cast("Any", None), engines=engines, workers=[])


# What engines and rollout workers are made of


ADAPTIVE = {"concurrency": "adaptive"}


@pytest.mark.parametrize(
    ("sections", "what", "value"),
    [
        # Engines read files only for what no sync brings.
        ({}, "engine_args", {"load_format": "dummy"}),
        ({"model": {"lora": LoraConfig(rank=8)}}, "engine_args", {}),
        ({"rollout": {"engine_args": {"quantization": "fp8"}}}, "engine_args", {"quantization": "fp8"}),
        ({"rollout": {"engine_args": {"load_format": "auto"}}}, "engine_args", {"load_format": "auto"}),
        # They report their load where it is used.
        ({}, "reports_load", False),
        ({"rollout": {"engine_stats": True}}, "reports_load", True),
        ({"rollout": ADAPTIVE}, "reports_load", True),
        ({"rollout": {"stop_token_ids": [7]}}, "stop_token_ids", (7,)),
        (
            {"rollout": {"gpu_memory_utilization": 0.6, "num_replicas": 4, "engines_per_device": 2}},
            "gpu_memory_utilization",
            0.3,
        ),
        ({"rollout": {"kv_cache_gib": 0.5}}, "kv_cache_gib", 0.5),
        ({"model": {"trust_remote_code": True}}, "trust_remote_code", True),
        ({}, "trust_remote_code", False),
    ],
)
def test_what_an_engine_is_made_of(sections: dict[str, Any], what: str, value: object) -> None:
    spec = engine_of(config(**sections))
    defaults = get_backend("cpu").engine_defaults()
    assert getattr(spec, what) == (defaults | value if isinstance(value, dict) else value)
    assert engine_args(spec)["trust_remote_code"] is spec.trust_remote_code


@pytest.mark.parametrize(
    ("sections", "values"),
    [
        # Requests are seeded where a run can repeat itself.
        ({"mode": {"max_staleness": 0}}, {"per_request_seed": True}),
        ({"mode": {"max_staleness": 1}}, {"per_request_seed": False}),
        ({"mode": {"max_staleness": 0}, "rollout": {"per_request_seed": False}}, {"per_request_seed": False}),
        ({"mode": {"max_staleness": 1}, "rollout": {"per_request_seed": True}}, {"per_request_seed": True}),
        # Each worker gets its share of an engine, and an evaluation what the engine takes.
        ({}, {"concurrency": None, "evaluation_window": 256}),
        ({"rollout": {"max_concurrency": 64}}, {"concurrency": (64, 64), "evaluation_window": 64}),
        (
            {"rollout": {"max_concurrency": 640, "max_num_seqs": 100}},
            {"concurrency": (640, 640), "evaluation_window": 100},
        ),
        (
            {"rollout": {"max_concurrency": 64, "num_workers": 3}},
            {"concurrency": (21, 21), "evaluation_window": 64},
        ),
        ({"rollout": ADAPTIVE}, {"concurrency": (1, 256), "evaluation_window": 256}),
        # What `auto` gave may be fewer than the bounds.
        (
            {"rollout": ADAPTIVE | {"max_num_seqs": 8, "min_concurrency": 16, "max_concurrency": 99}},
            {"concurrency": (8, 8)},
        ),
        ({"rollout": ADAPTIVE | {"min_concurrency": 16, "num_workers": 2}}, {"concurrency": (8, 128)}),
        ({"rollout": ADAPTIVE | {"max_concurrency": 100}}, {"concurrency": (1, 100), "evaluation_window": 100}),
        # Moves fill no engine beyond what it runs at once.
        ({"rollout": {"repack_below": 8, "max_num_seqs": 100}}, {"repacking": ConsolidationRule(below=8, most=100)}),
        ({}, {"repacking": None, "agent": "", "agent_args": {}, "agent_timeout_s": None, "trust_remote_code": False}),
        ({"rollout": {"stop": ["</s>"]}}, {"sampling.stop": ("</s>",)}),
        ({"model": {"trust_remote_code": True}}, {"trust_remote_code": True}),
        (
            {"task": {"agent": "my.loop", "agent_args": {"turns": 2}, "agent_timeout_s": 900.0}},
            {"agent": "my.loop", "agent_args": {"turns": 2}, "agent_timeout_s": 900.0},
        ),
    ],
)
def test_what_a_rollout_worker_is_made_of(sections: dict[str, Any], values: dict[str, Any]) -> None:
    spec = worker_spec(config(**sections))
    for name, value in values.items():
        wanted = LimitRange(lowest=value[0], highest=value[1]) if name == "concurrency" and value else value
        assert attrgetter(name)(spec) == wanted, name


@pytest.mark.parametrize("name", ESTIMATORS)
def test_workers_make_a_greedy_baseline_for_the_estimator_that_needs_one_and_for_no_other(name: str) -> None:
    needed = ["algorithm.kl.coef=1", "algorithm.kl.reference_model=builtin:tiny"] if name == "zero" else []
    spec = worker_spec(load_config([f"algorithm.advantage_estimator={name}", *needed]))
    assert spec.greedy_baseline == (name == "remax")


def test_engines_draw_from_the_seed_of_the_run_and_each_its_own_numbers() -> None:
    names = ("replica_0", "replica_1", "replica_0_restart_1")
    seeds = [engine_of(config(), name=name).seed for name in names]
    assert len({*seeds, engine_of(replace(config(), seed=1)).seed}) == 4
    assert seeds == [engine_of(config(), name=name).seed for name in names]


def test_workers_begin_with_different_engines(made: dict[str, list[Any]]) -> None:
    cfg = config(rollout={"num_workers": 2, "num_replicas": 4})
    placement, engines = plan_placement(cfg, resource=None), {f"replica_{i}": f"actor {i}" for i in range(4)}
    compose.with_workers(cfg, placement, without_learner(**engines))
    compose.new_worker(cfg, placement, engines, index=1, restart="_restart_1")
    first, second, again = (list(given[1]) for given in made["rollout_worker"])
    assert (first[0], second[0]) == ("replica_0", "replica_2")
    assert again == second, "one that is restarted goes where its predecessor went"


@pytest.mark.parametrize(("device", "rank", "level"), [("cpu", 0, 0), ("cuda", 0, 2), ("cuda", 8, 1)])
def test_how_deep_engines_sleep_on_shared_devices(device: str, rank: int, level: int) -> None:
    cfg = config(mode={"name": "colocated"}, model={"lora": LoraConfig(rank=rank)})
    assert compose.sleep_level(cfg, build(device)) == level
    assert compose.sleep_level(config(), build(device)) is None


@pytest.mark.parametrize(("device", "forks"), [("cpu", True), ("cuda", True), ("rocm", False), ("npu", None)])
def test_a_driver_without_the_device_can_describe_an_engine(device: str, forks: bool | None) -> None:
    """Engines are forked where an import touches no device."""
    backend: Any = SimpleNamespace(name=device, capabilities=build(device).capabilities, engine_args=dict)
    assert forks is None or engine_of(config(), device=backend).forks is forks
    if not build(device).is_available():
        assert engine_of(config(), device=build(device)).device == device


@pytest.mark.parametrize(("mode", "ports"), [("async", None), ("colocated", "auto")])
def test_actors_on_shared_devices_get_what_sharing_needs(mode: str, ports: str | None) -> None:
    cfg = config(mode={"name": mode})
    placement: Any = SimpleNamespace(env=lambda _name: {}, options=lambda _name: {})
    for role in ("learner", "engine"):
        options = compose._options(cfg, build("npu"), placement, role=role, name="replica_0")
        assert options["runtime_env"]["env_vars"].get("HCCL_NPU_SOCKET_PORT_RANGE") == ports


@pytest.mark.parametrize(
    ("address", "role", "is_kept"), [("local", "learner", 1), ("local", "engine", 0), ("auto", "learner", 0)]
)
def test_what_a_learner_compiles_is_kept_for_the_next_run(
    address: str, role: Any, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", "/cache")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    placement: Any = SimpleNamespace(options=lambda _name: {})
    options = compose._options(config(ray={"address": address}), build("cpu"), placement, role=role, name="a")
    found = options["runtime_env"]["env_vars"].get("TORCHINDUCTOR_CACHE_DIR")
    assert found == ("/cache/inductor" if is_kept else None)


# Paths: actors may be started in another directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models, a tokenizer and a reward in it."""
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


async def test_every_kind_of_actor_gets_absolute_paths_and_the_device_that_the_driver_found(
    here: Path, made: dict[str, list[Any]]
) -> None:
    models = ("models/policy", "models/critic", "models/teacher")
    cfg = named("judge.py:score", "agents/loop.py:Loop", models=models, tokenizer="./tokenizer")
    placement = plan_placement(cfg, resource=None)
    assert cfg.device.name == "auto"
    await compose.create_learner(cfg, placement, get_backend("cpu"))
    compose.create_engines(cfg, placement, get_backend("cpu"), version=0)
    compose.with_workers(cfg, placement, without_learner(replica_0=None))
    learner, engine, worker = (made[kind][0][0] for kind in ("learner", "engine", "rollout_worker"))
    policy, tokenizer = str(here / "models/policy"), str(here / "tokenizer")
    assert learner.device.name == "cpu", "`auto` on its own node may find another"
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


# The start


def rank_of(*warnings: str, **seconds: float) -> HandActor:
    seconds = {"imports": 0.0} | seconds
    return HandActor(
        setup=SetupReport(
            seconds=seconds, warnings=warnings, flops=None, max_tokens_per_micro_batch=64, description="not sharded"
        )
    )


def engine(reply: object = None, **startup_s: float) -> HandActor:
    return HandActor(start=startup_s if reply is None else reply, prepare=None)


async def start(
    ranks: list[HandActor],
    engines: list[HandActor],
    *workers: HandActor,
    trace: Path | None = None,
    resumed: Any = None,
    in_turns: bool = False,
    **sections: Any,
) -> None:
    ranks[0].responses["node_address"] = ("10.0.0.1", 77)
    named_engines = {f"replica_{i}": e for i, e in enumerate(engines)}
    actors = Actors(learner=LearnerGroup(ranks, timeout_s=30.0), engines=named_engines, workers=[*workers])
    tracer = Tracer(trace)
    cfg = config(**sections)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_num_seqs=8))
    placement = plan_placement(cfg, resource=None)
    await compose.start_actors(cfg, placement, actors, resumed, tracer, in_turns=in_turns)
    tracer.close()


async def test_log_and_trace_show_where_the_time_of_each_went_and_warnings_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ranks = [rank_of("no such kernel", imports=3.0, model=1.0), rank_of("no such kernel", imports=2.0, model=5.0)]
    await start(ranks, [engine(imports=7.0, processes=20.5)], HandActor(), trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {event["name"]: event["args"] for event in events if event["ph"] == "b"} == {
        "learner": {"imports": 3.0, "model": 5.0},
        "replica_0": {"imports": 7.0, "processes": 20.5},
        "rollout_worker_0": {},
    }
    assert re.search(r"learner is ready after \d+\.\d s \(imports 3\.0 s, model 5\.0 s\)", caplog.text)
    assert re.search(r"replica_0 is ready after \d+\.\d s \(imports 7\.0 s, processes 20\.5 s\)", caplog.text)
    assert "learner: not sharded; up to 64 tokens per micro-batch" in caplog.text
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == ["learner: no such kernel"]


@pytest.mark.parametrize(("state", "tokens"), [({"learner": {"max_tokens_per_micro_batch": 12288}}, 12288), ({}, None)])
async def test_a_resumed_learner_is_told_the_micro_batches_that_it_had(
    state: dict[str, Any], tokens: int | None
) -> None:
    rank = rank_of()
    rank.responses["load"] = 5
    await start([rank], [engine()], resumed=SimpleNamespace(state=state, path=Path("step_5")))
    assert ("setup", (("10.0.0.1", 77), tokens)) in rank.calls


async def test_the_first_failure_ends_the_start_while_others_hang() -> None:
    engines = [engine("hang"), engine(ValueError("no memory"))]
    with pytest.raises(ValueError, match="no memory"):
        await start([HandActor(setup="hang")], engines, HandActor(start="hang"))


async def test_a_start_that_takes_too_long_names_its_limit_and_where_actors_printed() -> None:
    with pytest.raises(TimeoutError, match=r"startup_timeout_s=0\.05; .*actor_logs/ \(on a joined cluster: the logs"):
        await start([rank_of()], [engine("hang")], HandActor(), trainer={"startup_timeout_s": 0.05})


@pytest.mark.parametrize("stays", [True, False])
async def test_engines_whose_turn_comes_later_import_at_once_and_begin_when_the_learner_has_left_or_may_stay(
    stays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    order: list[str] = []
    ready = replace(rank_of().responses["setup"], stays_on_device=stays)

    class Noting(HandActor):
        def __getattr__(self, name: str) -> Any:
            order.append(name)
            return super().__getattr__(name)

    await start([Noting(setup=ready)], [Noting(**engine().responses)], in_turns=True, mode={"name": "colocated"})
    assert order == ["node_address", "prepare", "setup", *([] if stays else ["offload"]), "start"]
    assert ("its memory stays beside the engines'" in caplog.text) == stays
    order.clear()
    await start([Noting(setup=ready)], [Noting(**engine().responses)], mode={"name": "colocated"})
    assert order[:3] == ["node_address", "start", "setup"] and ("offload" not in order) == stays
    assert "prepare" not in order


@pytest.mark.parametrize(
    ("mode", "stays", "turns"), [("async", True, False), ("colocated", True, False), ("colocated", False, True)]
)
def test_devices_are_handed_over_only_where_the_learner_must_leave_them(mode: Any, stays: bool, turns: bool) -> None:
    cfg, nothing = config(), cast("Any", None)
    actors = cast("Any", SimpleNamespace(learner=SimpleNamespace(stays_on_device=stays), engines={}))
    devices = make_devices(replace(cfg, mode=replace(cfg.mode, name=mode)), actors, nothing, nothing)
    assert isinstance(devices, ColocatedDevices) == turns


async def test_an_engine_that_cannot_be_imported_ends_the_start_while_the_learner_still_rehearses() -> None:
    broken = HandActor(prepare=ImportError("no such library"))
    with pytest.raises(ImportError, match="no such library"):
        await start([HandActor(setup="hang")], [broken], in_turns=True, mode={"name": "colocated"})


# Calls without a reply


class Hanging(HandActor):
    def __getattr__(self, name: str) -> Any:
        self.responses[name] = "hang"
        return super().__getattr__(name)


def test_the_driver_waits_for_everything_that_a_worker_bounds_itself() -> None:
    """Generation (of a whole trajectory with an agent), then the queue of the rewards, the start of a process, and the
    call."""
    cfg = config(rollout={"request_timeout_s": 50.0})
    spec = worker_spec(cfg)
    bounded_s = spec.request_timeout_s + spec.reward_queue_timeout_s + LOAD_TIMEOUT_S + spec.reward_timeout_s
    assert group_timeout_s(cfg) == bounded_s
    agent = replace(cfg, task=replace(cfg.task, agent="my.loop", agent_timeout_s=900.0))
    assert group_timeout_s(agent) - group_timeout_s(cfg) == 850.0


def replica() -> EngineReplica:
    return EngineReplica("replica_1", Hanging())


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (
            lambda: replica().call("ws_pull", timeout_s=1.0),
            r"ws_pull timed out after 6 s on replica_1; .*weight_sync\.timeout_s.*actor_logs/",
        ),
        (
            lambda: replica().commit(3, "ws_commit", timeout_s=1.0),
            r"ws_commit timed out after 6 s on replica_1; .*weight_sync\.timeout_s",
        ),
        (
            lambda: RankHandle(Hanging(), rank=1).call("ws_pack", timeout_s=2.0),
            r"ws_pack timed out after 2 s on learner rank 1; .*weight_sync\.timeout_s.*actor_logs/",
        ),
        (
            lambda: RankHandle(Hanging(), rank=0).call("save", timeout_s=2.0),
            r"save timed out after 2 s on learner rank 0; .*learner\.timeout_s",
        ),
        (
            lambda: call(
                HandActor(start=TimeoutError("its own")).start.remote(), timeout_s=5.0, who="a", what="b", hint="c"
            ),
            "^its own$",
        ),
    ],
)
def test_a_timeout_names_who_was_silent_how_long_and_what_to_increase(begin: Any, words: str) -> None:
    with pytest.raises(TimeoutError, match=words):
        run_virtual(begin())


@in_virtual_time
async def test_a_learner_that_does_not_close_is_known_to_hang() -> None:
    rank = RankHandle(Hanging(), rank=0)
    await EpochOpener([rank], options=SyncOptions(), clock=time.monotonic).close(None, [], 10.0)
    assert rank.is_broken


# A new engine in place of a lost one


@in_virtual_time
async def test_the_fleet_learns_at_once_what_weight_sync_has_lost_also_before_it_was_there() -> None:
    cfg, members, listeners = config(), {"replica_0": "dead", "replica_1": "live"}, list[Any]()
    coordinator: Any = SimpleNamespace(members=members, on_change=listeners.append)
    actors = without_learner(replica_0=HandActor(), replica_1=HandActor())
    fleet = compose.make_fleet(
        cfg,
        plan_placement(cfg, resource=None),
        get_backend("cpu"),
        actors,
        coordinator,
        DedicatedDevices(coordinator),
        live_version=lambda: 1,
    )
    assert fleet.lost_engines == {"replica_0": "lost (weight sync: dead)"}
    members["replica_1"] = "dirty"
    for listener in listeners:
        listener()
    assert fleet.lost_engines.keys() == members.keys()


@pytest.mark.parametrize(
    ("fails_at", "log"),
    [
        ("", ["kill old", "join replica_0"]),
        ("start", ["kill old", "kill new"]),
        ("join", ["kill old", "join replica_0", "kill new"]),
    ],
)
@in_virtual_time
async def test_a_lost_engine_is_replaced_and_a_new_one_without_weights_is_killed(
    fails_at: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, found = config(rollout={"max_engine_restarts": 1, "max_num_seqs": 8}), list[str]()
    new = HandActor(start=OSError("no") if fails_at == "start" else None)
    old = HandActor(load=EngineDead("it died"))

    async def join(replica: EngineReplica) -> int:
        found.append(f"join {replica.name}")
        if fails_at == "join":
            raise OSError("no")
        return 7

    def made(*_: object, name: str, version: int) -> HandActor:
        assert (name, version) == ("replica_0_restart_1", 5)
        return new

    monkeypatch.setattr(compose.ray, "kill", lambda actor: found.append("kill new" if actor is new else "kill old"))
    monkeypatch.setattr(compose, "new_engine", made)
    coordinator: Any = SimpleNamespace(join=join, members={"replica_0": "live"}, on_change=lambda _: None)
    actors, backend = without_learner(replica_0=old), get_backend("cpu")
    placement = plan_placement(cfg, resource=None)
    fleet = compose.make_fleet(
        cfg, placement, backend, actors, coordinator, DedicatedDevices(coordinator), live_version=lambda: 5
    )
    watch = asyncio.create_task(fleet.watch(needs_groups=lambda: False, needs_engines=lambda: True))
    await asyncio.sleep(3.0)
    watch.cancel()
    assert found == log
    assert actors.engines == {"replica_0": new}
    assert bool(fleet.lost_engines) == bool(fails_at)
