"""The rocm backend: AMD GPUs through libamdhip64. Never run on hardware: its contract tests use a fake library."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.device.accelerator import ENGINE_SPAWNS, CudaLikeBackend
from weight_sync.device.base import Capabilities, Role
from weight_sync.device.driver import CudaLikeDriver
from weight_sync.device.environment import EnvVar
from weight_sync.device.library import load_library
from weight_sync.node import node_id

if TYPE_CHECKING:
    import ctypes

_SLEEP_MODE_SINCE = (6, 4)
"""ROCm 6.3.4 has it too, but torch only knows HIP's version, which does not tell 6.3.4 from 6.3.0."""
_NOSET = tuple(f"RAY_EXPERIMENTAL_NOSET_{vendor}_VISIBLE_DEVICES" for vendor in ("HIP", "ROCR"))
_WHY_NOSET = "Ray would narrow each process to its own devices, and HIP IPC handles number those of the whole host"
_LEGACY_IPC = "HSA_ENABLE_IPC_MODE_LEGACY"
"""With 1, memory gets no handle."""
_CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64)


class RocmBackend(CudaLikeBackend):
    """AMD."""

    name = "rocm"
    visible_devices_var = "HIP_VISIBLE_DEVICES"
    sees_whole_host = True
    visible_devices_alias = "CUDA_VISIBLE_DEVICES"
    _call_prefix = "hip"
    _libraries = ("libamdhip64", "librccl")
    version_files = ("sys/module/amdgpu/version", "opt/rocm*/.info/version")
    _ipc_hint = (
        "a HIP handle names its device by the number that it has in the exporting process, so both processes must see "
        "the same devices in the same order (HIP_VISIBLE_DEVICES), run as the same user and share /dev/kfd and /dev/dri"
    )

    variables = (
        *(EnvVar(name=name, value="1", why=_WHY_NOSET, overrides=True) for name in _NOSET),
        EnvVar(
            name="HSA_NO_SCRATCH_RECLAIM",
            value="1",
            why="without it the first collective fails with ncclSystemError on MI300X; read when HIP starts",
        ),
        EnvVar(
            name=_LEGACY_IPC,
            value="0",
            why="vLLM's images for ROCm have 1, with which hipIpcGetMemHandle fails; read when HIP starts",
            overrides=True,
        ),
        ENGINE_SPAWNS,
    )

    def _load(self, stem: str) -> ctypes.CDLL:
        rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
        installed = [Path(torch.__file__).parent / "lib" / f"{stem}.so", *sorted((rocm / "lib").glob(f"{stem}.so*"))]
        return load_library(stem, installed=installed)

    def capabilities(self) -> Capabilities:
        # A driver whose torch is for something else does not know what its nodes have.
        sleeps = torch.version.hip is None or _version(torch.version.hip) >= _SLEEP_MODE_SINCE
        ipc = os.environ.get(_LEGACY_IPC) != "1"
        return Capabilities(ipc=ipc, sleep_mode=sleeps, forks=False, float32_products=True)

    def device_identity(self) -> str:
        # torch's UUIDs of a device differ between processes.
        index = self.enter()
        assert isinstance(self._driver, CudaLikeDriver)
        return f"{node_id()}-{self._driver.pci_bus_id(index)}"

    def check_env(self, role: Role, environ: dict[str, str]) -> list[str]:
        problems = super().check_env(role, environ)
        problems += [
            f"{name} must be '1', got {environ[name]!r} ({_WHY_NOSET}); remove it from `device.env`"
            for name in _NOSET
            if role != "driver" and environ.get(name, "1") != "1"
        ]
        hip = environ.get("HIP_VISIBLE_DEVICES")
        if hip is None and "ROCR_VISIBLE_DEVICES" in environ:
            problems.append(
                "ROCR_VISIBLE_DEVICES is set without HIP_VISIBLE_DEVICES, which Ray refuses; "
                f"unset it and set HIP_VISIBLE_DEVICES={environ['ROCR_VISIBLE_DEVICES']} before `ray start`"
            )
        cuda = environ.get("CUDA_VISIBLE_DEVICES")
        if hip is not None and cuda is not None and cuda != hip:
            problems.append(
                f"HIP_VISIBLE_DEVICES={hip!r} and CUDA_VISIBLE_DEVICES={cuda!r} disagree, and HIP reads both; "
                "unset CUDA_VISIBLE_DEVICES"
            )
        return problems

    def engine_defaults(self) -> dict[str, Any]:
        # Capturing graphs of large batches can crash the runtime.
        return {"cudagraph_capture_sizes": list(_CAPTURE_SIZES)}


def _version(hip: str | None) -> tuple[int, ...]:
    """Major and minor version of e.g. 6.4.43482-0f2d60242; the third number is a build, not ROCm's patch level."""
    found = re.match(r"(\d+)\.(\d+)", hip) if hip is not None else None
    return () if found is None else tuple(int(part) for part in found.groups())
