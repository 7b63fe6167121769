"""The cuda backend: NVIDIA GPUs through libcudart."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weight_sync.device.accelerator import AcceleratorBackend, cuda_like_env, cuda_like_identity
from weight_sync.device.collectives import PairGroup, nccl_group
from weight_sync.device.driver import CudaLikeDriver
from weight_sync.device.environment import EnvVar, is_true
from weight_sync.device.process import load_library
from weight_sync.device.torch_binding import CudaBinding, TorchBinding

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from weight_sync.device.base import Role

_NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


class CudaBackend(AcceleratorBackend):
    """NVIDIA. `library` replaces libcudart and `binding` replaces torch.cuda; both are for tests."""

    name = "cuda"
    torch_device = "cuda"
    ray_resource = "GPU"
    visible_devices_var = "CUDA_VISIBLE_DEVICES"
    # gloo beside nccl: CPU offload and asynchronous checkpoints put host tensors through collectives.
    collective = "cpu:gloo,cuda:nccl"
    _ipc_hint = (
        "both processes must run on the same host, as the same user, with devices that can reach each other (check "
        "`nvidia-smi topo -p2p r`), and containers must share the host's IPC and process-id namespaces"
    )

    def __init__(self, *, library: str | None = None, binding: TorchBinding | None = None) -> None:
        super().__init__(CudaBinding("cuda") if binding is None else binding, library=library)

    def _load_driver(self, library: str | None) -> CudaLikeDriver:
        if library is not None:
            return CudaLikeDriver(ctypes.CDLL(library), "cuda")
        version = torch.version.cuda
        major = "" if version is None else "." + version.split(".")[0]
        loaded = load_library("libcudart", installed=_wheel_libraries(major), sonames=[f"libcudart.so{major}"])
        return CudaLikeDriver(loaded, "cuda")

    def device_identity(self) -> str:
        return cuda_like_identity(self._enter())

    def _connect_pair(self, store: Store, *, rank: int, timeout_s: float, device: torch.device) -> PairGroup:
        return nccl_group(store, rank=rank, timeout_s=timeout_s, device=device)

    def process_env(self, role: Role) -> tuple[EnvVar, ...]:
        match role:
            case "driver":
                return ()
            case "learner":
                segments = EnvVar(
                    name="PYTORCH_ALLOC_CONF",
                    value="expandable_segments:True",
                    why="packed micro-batches vary in length and fragment torch's cache; weight-sync arenas are raw "
                    "driver allocations and are not affected",
                )
                return (segments,)
            case "engine":
                return (cuda_like_env(), *_sampler_env())

    def check_env(self, role: Role, environ: dict[str, str]) -> list[str]:
        problems = super().check_env(role, environ)
        if is_true(environ.get(_NOSET)):
            problems.append(
                f"{_NOSET} is set, so every learner and engine would see all devices and take device 0; "
                "unset it before `ray start`"
            )
        return problems


def _sampler_env() -> tuple[EnvVar, ...]:
    if importlib.util.find_spec("flashinfer") is not None:
        return ()
    why = "flashinfer is not installed, and vLLM's sampler would look for it"
    return (EnvVar(name="VLLM_USE_FLASHINFER_SAMPLER", value="0", why=why),)


def _wheel_libraries(major: str) -> list[Path]:
    """Where the CUDA wheels that torch depends on keep libcudart: nvidia/cuda_runtime (12) or nvidia/cu13 (13)."""
    site = Path(torch.__file__).parent.parent
    nvidia = sorted((site / "nvidia").glob(f"*/lib/libcudart.so{major}"))
    return [*nvidia, *sorted((site / "torch" / "lib").glob(f"libcudart*.so{major}*"))]
