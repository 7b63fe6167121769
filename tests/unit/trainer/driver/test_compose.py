"""What a configuration becomes for engines and rollout workers."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engine.vllm_config import engine_args
from tests.fakes.scripted_run import config
from trainer.config.schema import LoraConfig
from trainer.driver import actors as compose
from trainer.driver.actors import Actors, engine_spec, replace_engine, sleep_level, worker_spec
from trainer.driver.placement import plan_placement
from weight_sync.device.select import build, get_backend


def spec_of(name: str = "replica_0", **sections: dict[str, Any]) -> Any:
    return engine_spec(config(**sections), get_backend("cpu"), name=name, version=3)


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
    seeds = [spec_of(name).seed for name in ("replica_0", "replica_1", "replica_0_restart_1")]
    assert len(set(seeds)) == 3
    assert seeds == [spec_of(name).seed for name in ("replica_0", "replica_1", "replica_0_restart_1")]
    other = engine_spec(replace(config(), seed=1), get_backend("cpu"), name="replica_0", version=0)
    assert other.seed not in seeds


@pytest.mark.parametrize(
    ("staleness", "wanted", "seeded"), [(0, None, True), (1, None, False), (0, False, False), (1, True, True)]
)
def test_requests_are_seeded_where_a_run_can_repeat_itself(staleness: int, wanted: bool | None, seeded: bool) -> None:
    cfg = config(mode={"max_staleness": staleness}, rollout={"per_request_seed": wanted})
    assert worker_spec(cfg).per_request_seed is seeded


def test_workers_begin_with_different_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = []
    actor = SimpleNamespace(remote=lambda _spec, engines: orders.append(list(engines)))
    monkeypatch.setattr(compose, "rollout_worker_actor", lambda: SimpleNamespace(options=lambda **_: actor))
    placement: Any = SimpleNamespace(options=lambda _name: {})
    cfg = config(rollout={"num_workers": 2, "num_replicas": 4})
    engines = {f"replica_{i}": f"actor {i}" for i in range(4)}
    compose.with_workers(cfg, placement, Actors(learner=None, engines=engines, workers=[]))  # type: ignore[arg-type]
    compose.new_worker(cfg, placement, engines, index=1, name="rollout_worker_1_restart_1")
    first, second, again = orders
    assert (first[0], second[0]) == ("replica_0", "replica_2")
    assert again == second, "one that is started again goes where its predecessor went"


@pytest.mark.parametrize(
    ("rollout", "reports"), [({}, False), ({"engine_stats": True}, True), ({"concurrency": "adaptive"}, True)]
)
def test_engines_report_their_load_where_somebody_looks_at_it(rollout: dict[str, Any], reports: bool) -> None:
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
    assert sleep_level(cfg, build(device)) == level
    assert sleep_level(config(), build(device)) is None


@pytest.mark.parametrize(("device", "forks"), [("cpu", True), ("cuda", True), ("rocm", False)])
def test_engines_are_forked_where_an_import_touches_no_device(device: str, forks: bool) -> None:
    backend = SimpleNamespace(name=device, capabilities=build(device).capabilities, engine_defaults=dict)
    assert engine_spec(config(), backend, name="replica_0", version=0).forks is forks  # type: ignore[arg-type]


@pytest.mark.parametrize("fails_at", ["", "start", "join"])
async def test_an_engine_without_weights_is_given_to_nobody(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Party:
        """New engine and coordinator in one."""

        @property
        def start(self) -> Any:
            return SimpleNamespace(remote=self._start)

        def _start(self) -> Any:
            future: Future[None] = Future()
            log.append("start")
            future.set_exception(OSError("no")) if fails_at == "start" else future.set_result(None)
            return SimpleNamespace(future=lambda: future)

        async def join(self, _: Any) -> int:
            log.append("join")
            if fails_at == "join":
                raise OSError("no")
            return 7

    new: Any = Party()
    monkeypatch.setattr(compose.ray, "kill", lambda actor: log.append("kill new" if actor is new else "kill old"))
    engines: dict[str, Any] = {"r0": object()}
    call = replace_engine("r0", lambda: new, engines=engines, coordinator=new, timeout_s=5.0)
    before = ["kill old", "start"]
    if fails_at:
        with pytest.raises(OSError, match="no"):
            await call
        assert log == [*before, *(["join"] if fails_at == "join" else []), "kill new"]
    else:
        assert await call == 7
        assert log == [*before, "join"]


async def test_learners_are_told_the_kind_of_device_that_the_driver_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` on their own node may find another."""
    configs: list[Any] = []
    actor = SimpleNamespace(remote=lambda cfg, **_: configs.append(cfg))
    monkeypatch.setattr(compose, "learner_actor", lambda: SimpleNamespace(options=lambda **_: actor))
    monkeypatch.setattr(compose, "new_engine", lambda *_, **__: None)
    cfg, backend = config(learner={"num_ranks": 1}), get_backend("cpu")
    assert cfg.device.name == "auto"
    await compose.create_actors(cfg, plan_placement(cfg, resource=None), backend, version=0)
    assert [one.device.name for one in configs] == ["cpu"]


@pytest.mark.parametrize("device", ["cuda", "rocm", "npu"])
def test_a_driver_without_the_device_can_say_what_an_engine_is_made_of(device: str) -> None:
    backend = build(device)
    if backend.is_available():
        pytest.skip("this machine has the device")
    assert engine_spec(config(), backend, name="replica_0", version=0).device == device
