"""The check of sleep memory, above a fake driver library whose memory an engine takes and gives back, or keeps."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.drivers.build import compile_fakes, compiler, make_backend
from tests.fakes.scripted_engine import ScriptedEngine
from trainer.tools.sleep import Awake, main
from weight_sync.messages import reply_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.interface import EngineSpec
    from weight_sync.device import Backend

MIB = 1 << 20


class Engine(ScriptedEngine):
    """Takes 600 MiB of the device, of which a sleep gives back all but `keeps`, and leaks `leaks` each time."""

    def __init__(self, spec: EngineSpec, backend: Backend, *, keeps: int, leaks: int) -> None:
        super().__init__(spec, workers=lambda method, args: [Awake().ws_nothing()])
        self._backend, self._keeps, self._leaks = backend, keeps, leaks
        self._held: list[Any] = []
        self._left: list[Any] = []

    def _take(self, mib: int) -> Any:
        return self._backend.alloc_persistent(mib * MIB)

    async def start(self) -> dict[str, float]:
        self._held = [self._take(600 - self._keeps)]
        self._left += [self._take(self._keeps)]
        return await super().start()

    async def sleep(self) -> None:
        await super().sleep()
        self._held.pop().close()
        if self._leaks:
            self._left.append(self._take(self._leaks))

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> Any:
        self._held.append(self._take(600 - self._keeps))
        return await super().commit(version, method, *args, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if compiler() is None:
        pytest.skip("no C compiler `cc` to build the fake driver libraries with")
    return compile_fakes(tmp_path_factory.mktemp("drivers"))["rocm"]


@pytest.fixture
def run(library: str) -> Callable[..., int]:
    fake = ctypes.CDLL(library)

    def begin(*, keeps: int, leaks: int = 0) -> int:
        fake.fake_reset()
        fake.fake_set_total(ctypes.c_size_t(2048 * MIB))
        backend = make_backend("rocm", library)
        specs: list[EngineSpec] = []

        def build(spec: EngineSpec) -> Engine:
            specs.append(spec)
            return Engine(spec, backend, keeps=keeps, leaks=leaks)

        code = main(["a-model", "--level", "2"], backend=backend, build=build)
        assert (specs[0].sleep_level, specs[0].device) == (2, "rocm")
        assert specs[0].env["HSA_NO_SCRATCH_RECLAIM"] == "1"
        return code

    return begin


@pytest.mark.parametrize(
    ("engine", "code", "words"),
    [
        ({"keeps": 20}, 0, "the memory is given back"),
        ({"keeps": 300}, 1, "round 1: of 0.59 GiB that the engine took, 0.29 GiB came back"),
        ({"keeps": 20, "leaks": 200}, 1, "a leak"),
    ],
)
def test_an_engine_that_keeps_memory_while_it_sleeps_is_found(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], engine: dict[str, int], code: int, words: str
) -> None:
    assert run(**engine) == code
    shown = capsys.readouterr().out
    assert words in shown and "round 3: awake" in shown


def test_a_device_whose_engines_cannot_sleep_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a-model", "--device", "cpu"]) == 2
    assert "engines on cpu cannot sleep" in capsys.readouterr().err


def test_the_call_that_wakes_an_engine_counts_as_a_commit() -> None:
    assert reply_state([Awake().ws_nothing()]) == "ok"
