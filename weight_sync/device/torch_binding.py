"""torch's side of an accelerator: its streams, and tensors over memory that a driver allocated."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _ArrayView:
    """A raw allocation described in the array interface that torch reads without copying."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 2
        }  # fmt: skip


class TorchBinding:
    """torch.cuda, which is also the name of torch's ROCm support; `flavour` is the build that must be there.

    Tests pass their own, which views the fake driver's memory as cpu tensors.
    """

    def __init__(self, flavour: str) -> None:
        self._flavour = flavour

    def unavailable_reason(self) -> str | None:
        """What torch lacks for this device and what to do; None if nothing. Never raises."""
        built_for = "rocm" if torch.version.hip is not None else "cuda" if torch.version.cuda is not None else "cpu"
        if built_for != self._flavour:
            return (
                f"torch {torch.__version__} is built for {built_for}, not for {self._flavour}; "
                f'install a torch build for it, e.g. pip install -e ".[{self._flavour}]"'
            )
        if not torch.cuda.is_available():
            return (
                "torch finds no device: the kernel driver is not loaded, too old for this torch, or no device is "
                "visible to this process; check nvidia-smi or rocm-smi and the visible-devices variable"
            )
        return None

    def set_device(self, index: int) -> torch.device:
        """Make `index` torch's device in this thread, with its context created, and return torch's name for it."""
        self._runtime().set_device(index)
        return self._device(index)

    def current_device(self) -> int:
        """torch's device in this thread, with its context created."""
        return self._runtime().current_device()

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in host memory."""
        return tensor.device.type == "cpu"

    def tensor_at(self, pointer: int, nbytes: int, index: int) -> torch.Tensor:
        """uint8[nbytes] over memory that stays the driver's."""
        device = self._device(index)
        # torch asks the driver where a pointer lives and copies if that is another device: ask about one byte, a block
        # may be larger than what is free here.
        if torch.as_tensor(_ArrayView(pointer, 1), device=device).data_ptr() == pointer:
            return _require_in_place(torch.as_tensor(_ArrayView(pointer, nbytes), device=device), pointer)
        # Memory that another device's process exported is mapped for us all the same; name the device ourselves so that
        # torch leaves it in place.
        storage = torch._C._construct_storage_from_data_pointer(pointer, device, nbytes)
        return _require_in_place(torch.empty(0, dtype=torch.uint8, device=device).set_(storage), pointer)

    def new_stream(self, index: int, create: Callable[[], int]) -> Any:
        """torch's object for a stream of device `index`, beside those in use. It lives as long as the process.

        `create` makes a stream of the driver's and returns its address. torch's own would not do: it hands them out in
        turn, so others, NCCL's among them, would get the same ones.
        """
        return torch.cuda.ExternalStream(create(), device=self._device(index))

    def address_of(self, stream: Any) -> int:
        """Address of a stream from `new_stream`. What torch has queued for it on the host goes to the driver first."""
        return stream.cuda_stream

    def current_stream(self) -> int:
        """Address of torch's current stream, as by `address_of`."""
        return self.address_of(self._runtime().current_stream())

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        """torch operations inside run on `stream`, which is from `new_stream`; they are the driver's when it ends."""
        with self._runtime().stream(stream):
            try:
                yield
            finally:
                self.address_of(stream)

    def flush(self, index: int) -> None:
        """All that torch has queued on the host for device `index` goes to the driver. May wait until it is done."""

    def release_cached(self) -> None:
        """Give the memory that torch caches but does not use back to the driver."""
        self._runtime().empty_cache()

    def device_bytes(self, index: int) -> int:
        """Memory of a device, without a context on it."""
        return self._runtime().get_device_properties(index).total_memory

    def device_name(self, index: int) -> str:
        """What the vendor calls the device."""
        return self._runtime().get_device_name(index)

    def _runtime(self) -> Any:
        """torch's module for this device, initialised."""
        torch.cuda.init()
        return torch.cuda

    def _device(self, index: int) -> torch.device:
        return torch.device("cuda", index)


class NpuBinding(TorchBinding):
    """torch_npu. Never run on hardware.

    There is no array interface for this device; torch_npu's own constructors are used, because a plain torch storage
    lacks the layout description that its operators look for.

    torch_npu puts operators into a queue on the host, from which a thread of its own launches them. The driver knows
    nothing of that queue. Reading `npu_stream` waits until it is empty, and so does `synchronize`, which also knows the
    queues that PER_STREAM_QUEUE gives to single streams.
    """

    def __init__(self) -> None:
        super().__init__("npu")

    def unavailable_reason(self) -> str | None:
        try:
            torch_npu = self._module()
        except (ImportError, OSError) as error:
            return f"torch_npu cannot be imported ({error}); install CANN, source its set_env.sh, and install torch-npu"
        if not torch_npu.npu.is_available():
            return "torch_npu finds no device; check npu-smi and ASCEND_RT_VISIBLE_DEVICES"
        return None

    def tensor_at(self, pointer: int, nbytes: int, index: int) -> torch.Tensor:
        torch_npu, device = self._module(), self._device(index)
        storage = torch_npu._C._construct_storage_from_data_pointer(pointer, device, nbytes)
        metadata = {
            "data_ptr": pointer, "device": device, "nbytes": nbytes, "dtype": torch.uint8, "size": (nbytes,),
            "stride": (1,), "storage_offset": 0,
        }  # fmt: skip
        return _require_in_place(
            torch_npu._C._construct_NPU_Tensor_From_Storage_And_Metadata(metadata, storage), pointer
        )

    def new_stream(self, index: int, create: Callable[[], int]) -> Any:
        # torch_npu's own: it takes none of the driver's (ExternalStream is missing from most releases, and where it is
        # there it cannot be waited for). They come from a pool, so others may get the same ones; that costs time only.
        return self._runtime().Stream(device=self._device(index))

    def address_of(self, stream: Any) -> int:
        address = stream.npu_stream
        if address == 0:
            raise DeviceError(
                "torch_npu could not launch what it had queued; its log (ASCEND_GLOBAL_LOG_LEVEL) says why"
            )
        return address

    def storage_format(self, tensor: torch.Tensor) -> int:
        """How the memory of a tensor is laid out, as torch_npu numbers it."""
        return self._module().get_npu_format(tensor)

    def flush(self, index: int) -> None:
        self._runtime().synchronize(self._device(index))

    def _runtime(self) -> Any:
        npu = self._module().npu
        npu.init()
        return npu

    def _device(self, index: int) -> torch.device:
        return torch.device("npu", index)

    def _module(self) -> Any:
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu


def _require_in_place(tensor: torch.Tensor, pointer: int) -> torch.Tensor:
    if tensor.data_ptr() != pointer:
        raise DeviceError(
            "torch copied a raw allocation instead of viewing it, so writes would not reach it; "
            f"report this with the versions of torch ({torch.__version__}) and of the driver"
        )
    return tensor
