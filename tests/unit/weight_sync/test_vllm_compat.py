from __future__ import annotations

import pytest

from weight_sync.vllm_compat import (
    UnsupportedVllm,
    check_vllm_version,
    engine_labels_tokens,
    pause_engine,
    resume_engine,
    set_engine_version,
)


@pytest.mark.parametrize("version", ["0.25.1", "0.25.1+cu130", "0.26.0", "0.32.0", "0.33.9rc2", "0.32.1.dev3+gabc"])
def test_versions_in_the_range_are_taken(version: str) -> None:
    assert check_vllm_version(version) == version


@pytest.mark.parametrize("version", ["0.25.0", "0.9.2", "0.34.0", "0.34", "1.0.0"])
def test_version_outside_is_refused_with_what_is_allowed(version: str) -> None:
    with pytest.raises(UnsupportedVllm, match=rf"vLLM {version} is not supported, allowed: >= 0.25.1, < 0.34"):
        check_vllm_version(version)


class Calls:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []


class NewCore(Calls):
    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.seen.append(("pause", mode, clear_cache))

    async def resume_scheduler_async(self) -> None:
        self.seen.append(("resume",))

    async def set_weight_version_async(self, weight_version: str) -> None:
        self.seen.append(("label", weight_version))


class NewEngine:
    def __init__(self) -> None:
        self.engine_core = NewCore()


class OldEngine(Calls):
    """Only the public calls."""

    engine_core = object()

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.seen.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.seen.append(("resume",))


@pytest.mark.parametrize(
    ("mode", "expected"), [("keep", ("keep", False)), ("recompute", ("keep", True)), ("abort", ("abort", True))]
)
async def test_in_flight_policies_become_pause_modes(mode: str, expected: tuple[str, bool]) -> None:
    new, old = NewEngine(), OldEngine()
    for engine in (new, old):
        await pause_engine(engine, mode=mode)
        await resume_engine(engine)
    assert new.engine_core.seen == [("pause", *expected), ("resume",)]
    assert old.seen == [("pause", *expected), ("resume",)]


async def test_only_engines_that_can_label_are_told_the_version() -> None:
    new, old = NewEngine(), OldEngine()
    assert engine_labels_tokens(new)
    assert not engine_labels_tokens(old)
    await set_engine_version(new, 7)
    await set_engine_version(old, 7)
    assert new.engine_core.seen == [("label", "7")]


def test_installed_vllm_has_the_calls_we_prefer() -> None:
    """The fakes above are only as good as this: the real signatures of the installed version."""
    import inspect

    client = pytest.importorskip("vllm.v1.engine.core_client")
    pause = inspect.signature(client.AsyncMPClient.pause_scheduler_async).parameters
    assert {"mode", "clear_cache"} <= set(pause)
    assert hasattr(client.AsyncMPClient, "resume_scheduler_async")
    check_vllm_version()
