"""Makes every Python process of a run believe that its host has accelerators of a vendor.

`tests.fakes.drivers.build.vendor_host` gives them the environment that leads here. What is real: all of Tandem but the
names below, Ray with its own code for the vendor, the calls into the vendor's library, which is the fake that refuses
what the vendor refuses. What is not: torch computes in host memory, and the engine is vLLM's build for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VENDOR = os.environ.get("FAKE_VENDOR", "")


def _on_host(backend: Any, binding: Callable[[], Any]) -> None:
    """torch knows its device as the host's, for tensors, meshes and groups of ranks; the driver does not."""
    import torch.distributed as dist

    start = dist.init_process_group
    backend.torch_device = "cpu"
    backend._make_binding = lambda self: binding()
    dist.init_process_group = lambda name, **rest: start("gloo" if name == backend.collective else name, **rest)


def _rocm(module: Any) -> None:
    from tests.fakes.drivers.build import DeviceLikeBinding

    _on_host(module.RocmBackend, lambda: DeviceLikeBinding(os.environ["FAKE_LIBRARY"]))


def _npu(module: Any) -> None:
    from tests.fakes.drivers.host_npu import HostNpuBinding

    _on_host(module.NpuBackend, lambda: HostNpuBinding(os.environ["FAKE_LIBRARY"]))


def _extension(module: Any) -> None:
    """The engine's parameters are in host memory, and count as the device's."""
    build = module.get_backend
    module.get_backend = lambda name: build(VENDOR)


def _amd_of_ray(module: Any) -> None:
    module.AMDGPUAcceleratorManager.get_current_node_num_accelerators = staticmethod(
        lambda: int(os.environ["FAKE_NUM_DEVICES"])
    )


PATCHES: dict[str, Callable[[Any], None]] = {
    f"weight_sync.device.{VENDOR}": {"rocm": _rocm, "npu": _npu}.get(VENDOR, lambda module: None),
    "weight_sync.vllm.extension": _extension,
}
if VENDOR == "rocm":
    PATCHES["ray._private.accelerators.amd_gpu"] = _amd_of_ray


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            PATCHES[fullname](module)

        spec.loader.exec_module = exec_module  # pyright: ignore[reportAttributeAccessIssue]
        return spec


if VENDOR:
    sys.meta_path.insert(0, _Finder())
