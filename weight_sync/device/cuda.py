"""The cuda backend: NVIDIA GPUs through libcudart."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weight_sync.device.accelerator import ENGINE_SPAWNS, CudaLikeBackend
from weight_sync.device.environment import EnvVar
from weight_sync.device.library import load_library

if TYPE_CHECKING:
    import ctypes

    from weight_sync.device.base import Role


class CudaBackend(CudaLikeBackend):
    """NVIDIA."""

    name = "cuda"
    visible_devices_var = "CUDA_VISIBLE_DEVICES"
    _call_prefix = "cuda"
    _libraries = ("libcudart", "libnccl")
    version_files = ("proc/driver/nvidia/version",)
    _ipc_hint = (
        "both processes must run on the same host, as the same user, with devices that can reach each other (check "
        "`nvidia-smi topo -p2p r`), and containers must share the host's IPC and process-id namespaces"
    )

    variables = (
        EnvVar(
            name="PYTORCH_ALLOC_CONF",
            value="expandable_segments:True",
            why="packed micro-batches vary in length and fragment torch's cache; weight-sync arenas are raw driver "
            "allocations and are not affected",
            roles=("learner",),
        ),
        ENGINE_SPAWNS,
    )

    def _load(self, stem: str) -> ctypes.CDLL:
        if stem == "libnccl":
            return load_library(stem, installed=_wheel_libraries("libnccl.so.2"), sonames=["libnccl.so.2"])
        version = torch.version.cuda
        major = "" if version is None else "." + version.split(".")[0]
        return load_library(stem, installed=_wheel_libraries(f"{stem}*.so{major}*"), sonames=[f"{stem}.so{major}"])

    def process_env(self, role: Role) -> tuple[EnvVar, ...]:
        found = super().process_env(role)
        if role != "engine" or importlib.util.find_spec("flashinfer") is not None:
            return found
        why = "flashinfer is not installed, and vLLM's sampler would look for it"
        return (*found, EnvVar(name="VLLM_USE_FLASHINFER_SAMPLER", value="0", why=why))


def _wheel_libraries(name: str) -> list[Path]:
    """Where the wheels that torch depends on keep a library: e.g. nvidia/cuda_runtime (CUDA 12) or nvidia/cu13 (13)."""
    site = Path(torch.__file__).parent.parent
    return [*sorted((site / "nvidia").glob(f"*/lib/{name}")), *sorted((site / "torch" / "lib").glob(name))]
