"""The npu backend: Ascend NPUs through libascendcl. Never run on hardware: its contract tests use a fake library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.device.accelerator import ENGINE_SPAWNS, AcceleratorBackend
from weight_sync.device.base import Capabilities, Role, bytes_to_copy
from weight_sync.device.collectives import Hccl
from weight_sync.device.driver import AclDriver
from weight_sync.device.environment import EnvVar
from weight_sync.device.library import load_library
from weight_sync.device.torch_binding import NpuBinding, TorchBinding
from weight_sync.errors import DeviceError
from weight_sync.node import node_id

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable


_CONNECT_TIMEOUT_S = (120, 7200)
"""What HCCL accepts."""
_COPY_ALIGNMENT = 64
"""Of both addresses of an asynchronous copy. ACL does not refuse others: their bytes are undefined."""
_FORMATS_IN_ROWS = (0, 2, 30)
"""NCHW, ND and NCDHW, as torch_npu numbers them."""
_WEIGHTS_IN_ROWS = {"weight_nz_mode": 0}
"""How newer versions of vllm-ascend spell VLLM_ASCEND_ENABLE_NZ=0."""


class NpuBackend(AcceleratorBackend):
    """Ascend."""

    name = "npu"
    torch_device = "npu"
    ray_resource = "NPU"
    visible_devices_var = "ASCEND_RT_VISIBLE_DEVICES"
    # A wrong access stops the device for the whole process, so this is not tried out.
    no_fused_kernels = "they read memory by its address, which Triton for Ascend is not known to allow"
    collective = "cpu:gloo,npu:hccl"
    version_files = ("usr/local/Ascend/driver/version.info", "usr/local/Ascend/ascend-toolkit/latest/version.cfg")
    _ipc_hint = (
        "driver, firmware and CANN must support memory sharing between processes (CANN 8.3 or later), and both "
        "processes must run on the same host as the same user"
    )

    variables = (
        EnvVar(
            name="HCCL_CONNECT_TIMEOUT",
            value="1800",
            why="seconds a rank waits for its peers; HCCL's 120 are less than a large model needs to load",
        ),
        EnvVar(
            name="VLLM_ASCEND_ENABLE_NZ",
            value="0",
            why="vllm-ascend would keep weights in the FRACTAL_NZ layout, which cannot be written row by row",
            roles=("engine",),
        ),
        ENGINE_SPAWNS,
    )
    _libraries = ("libascendcl", "libhccl")
    _collectives_of = Hccl

    def _make_binding(self) -> TorchBinding:
        return NpuBinding()

    def _make_driver(self, library: ctypes.CDLL) -> AclDriver:
        return AclDriver(library)

    def _load(self, stem: str) -> ctypes.CDLL:
        home = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
        return load_library(stem, installed=[home / "lib64" / f"{stem}.so"])

    def capabilities(self) -> Capabilities:
        # A driver without the library may head a cluster of others: it asks for what does not depend on it.
        ipc = self.is_available() and isinstance(self._driver, AclDriver) and self._driver.has("ipc_export")
        return Capabilities(ipc=ipc, sleep_mode=True, forks=False)

    def device_identity(self) -> str:
        index = self.enter()
        assert isinstance(self._driver, AclDriver)
        number = self._driver.host_index(index)
        return f"{node_id()}-{self.device_id(index, os.environ) if number is None else number}"

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Any | None = None) -> None:
        """As everywhere; what is not aligned for the copy engine is copied by torch, on the same stream."""
        if not any(tensor.data_ptr() % _COPY_ALIGNMENT for tensor in (dst, src)):
            super().copy_async(dst, src, stream)
        elif bytes_to_copy(dst, src):
            self.enter()
            with self.use_stream(stream):
                dst.view(-1).view(torch.uint8).copy_(src.view(-1).view(torch.uint8))

    def check_layout(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert isinstance(self._binding, NpuBinding)
        blocked = [
            f"{name} (format {number})"
            for name, tensor in named
            if not tensor.is_meta and (number := self._binding.storage_format(tensor)) not in _FORMATS_IN_ROWS
        ]
        if blocked:
            raise DeviceError(
                f"{len(blocked)} parameters are not laid out in rows, so weight sync cannot write them, among them "
                f"{', '.join(blocked[:3])}; they must be in ND (format 2): leave VLLM_ASCEND_ENABLE_NZ=0 and "
                "additional_config.weight_nz_mode=0 as they are, and use no quantization that needs FRACTAL_NZ"
            )

    def sharing_env(self) -> tuple[EnvVar, ...]:
        return tuple(
            EnvVar(
                name=f"HCCL_{side}_SOCKET_PORT_RANGE",
                value="auto",
                why="processes that share a device would ask for the same ports of HCCL",
            )
            for side in ("HOST", "NPU")
        )

    def check_env(self, role: Role, environ: dict[str, str]) -> list[str]:
        problems = super().check_env(role, environ)
        if role == "driver":
            return problems
        timeout = environ.get("HCCL_CONNECT_TIMEOUT")
        low, high = _CONNECT_TIMEOUT_S
        if timeout is not None and not (timeout.isdigit() and low <= int(timeout) <= high):
            problems.append(f"HCCL_CONNECT_TIMEOUT must be a whole number of seconds in {low}..{high}, got {timeout!r}")
        layout = environ.get("VLLM_ASCEND_ENABLE_NZ")
        if role == "engine" and layout not in (None, "0"):
            problems.append(
                f"VLLM_ASCEND_ENABLE_NZ must be '0': weight sync writes the engine's weights in place, got {layout!r}; "
                "remove it from `device.env` and from the environment"
            )
        return problems

    def engine_defaults(self) -> dict[str, Any]:
        return {"additional_config": dict(_WEIGHTS_IN_ROWS)}

    def engine_args(self, user: Mapping[str, Any]) -> dict[str, Any]:
        config = user.get("additional_config", {})
        if not isinstance(config, Mapping) or config.get("weight_nz_mode", 0) != 0:
            raise DeviceError(
                f"additional_config must be a map, in which weight_nz_mode must be 0, got {config!r}: weight sync "
                "writes the engine's weights in place; leave weight_nz_mode out"
            )
        return {**user, "additional_config": {**config, **_WEIGHTS_IN_ROWS}}
