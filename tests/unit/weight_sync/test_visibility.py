"""What a process is shown where Ray does not do it. The device, ROCm, is a fake: no such host is at hand."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engine.actor import EngineActor
from rollout.engine.interface import EngineSpec
from tests.fakes.scripted_run import config
from trainer.learner import actor as learner_module
from trainer.learner.actor import LearnerActor
from weight_sync.device import DeviceError
from weight_sync.device.rocm import RocmBackend
from weight_sync.device.select import build
from weight_sync.device.visibility import show_own_devices, shown

HIP = "HIP_VISIBLE_DEVICES"


def fake_ray(own: list[str], *, num_devices: int = 4) -> Any:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": own}, get_node_id=lambda: "here")
    others = {"NodeID": "there", "Resources": {"GPU": 99.0}}
    here = {"NodeID": "here", "Resources": {"GPU": float(num_devices)}}
    return SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: [others, here])


@pytest.fixture(autouse=True)
def no_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIP, "")  # so that it is as before when the test ends
    monkeypatch.delenv(HIP)


@pytest.mark.parametrize(
    ("own", "inherited", "expected"),
    [
        (["2"], None, "2,0,1,3"),
        (["3", "1"], None, "1,3,0,2"),
        (["5"], "4,5,7", "5,4,7"),
        (["5"], "5,4,7", "5,4,7"),
        (["GPU-b"], "GPU-a,GPU-b", "GPU-b,GPU-a"),
    ],
)
def test_a_process_sees_all_devices_and_its_own_first(own: list[str], inherited: str | None, expected: str) -> None:
    environ = {} if inherited is None else {HIP: inherited}
    assert shown(build("rocm"), own, num_devices=4, environ=environ) == {HIP: expected}


def test_a_second_variable_that_says_the_same_goes_on_saying_the_same() -> None:
    both = {HIP: "0,1,2", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    told = shown(build("rocm"), ["1"], num_devices=4, environ=both)
    assert told == {HIP: "1,0,2", "CUDA_VISIBLE_DEVICES": "1,0,2"}
    told = shown(build("rocm"), ["1"], num_devices=4, environ=both | {"CUDA_VISIBLE_DEVICES": "2"})
    assert told == {HIP: "1,0,2"}, "what is refused is not made right by chance"


def test_a_variable_that_leaves_out_what_ray_gave_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"HIP_VISIBLE_DEVICES=0,1 leaves out 2"):
        shown(build("rocm"), ["1", "2"], num_devices=4, environ={HIP: "0,1"})


def test_an_actor_without_devices_of_its_own_keeps_what_it_was_told_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    show_own_devices("rocm", fake_ray([]))
    assert HIP not in os.environ
    monkeypatch.setenv(HIP, "2,3,0,1")
    show_own_devices("rocm", fake_ray([]))
    assert os.environ[HIP] == "2,3,0,1"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "npu"])
def test_nothing_is_done_and_ray_is_not_asked_where_ray_shows_the_devices_itself(device: str) -> None:
    before = dict(os.environ)
    nobody: Any = None
    show_own_devices(device, nobody)
    assert dict(os.environ) == before


def test_a_learner_knows_its_device_before_the_driver_is_first_called(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(RocmBackend, "unavailable_reason", lambda _: asked.append(os.environ.get(HIP)))
    monkeypatch.setattr(learner_module, "ray", fake_ray(["3"]))
    worker = LearnerActor(config(device={"name": "rocm"}), rank=0, world_size=1)
    with pytest.raises(DeviceError, match="RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES should be '1'"):
        worker.setup(("nowhere", 1))
    for variable in build("rocm").process_env("learner"):
        monkeypatch.setenv(variable.name, variable.value)
    worker._check_device()
    assert set(asked) == {"3,0,1,2"}
    assert worker.visible_devices() == "3,0,1,2", "which an engine on the same device is shown"


def test_an_engine_knows_its_devices_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake_ray(["2", "3"])
    monkeypatch.setattr("ray.get_runtime_context", ray.get_runtime_context)
    monkeypatch.setattr("ray.nodes", ray.nodes)
    seen: list[str | None] = []

    def building(_: EngineSpec) -> Any:
        seen.append(os.environ.get(HIP))

    EngineActor(EngineSpec(model="none", device="rocm", tensor_parallel_size=2), build=building)
    assert seen == ["2,3,0,1"]


def test_a_learner_whose_node_has_not_the_device_that_was_named_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    if build("cuda").is_available():
        pytest.skip("this machine has the device")
    for variable in build("cuda").process_env("learner"):
        monkeypatch.setenv(variable.name, variable.value)
    worker = LearnerActor(config(device={"name": "cuda"}), rank=0, world_size=1)
    with pytest.raises(DeviceError, match="device 'cuda' cannot be used on the learner's node: "):
        worker._check_device()
