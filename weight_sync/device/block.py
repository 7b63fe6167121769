"""A raw driver allocation of this process, or another process's, mapped: how long it lives, and how it ends."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from weight_sync.device.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from weight_sync.device.binding import TorchBinding
    from weight_sync.device.driver import Driver


class DriverBlock:
    """See `PersistentBlock`. Made by `AcceleratorBackend` only."""

    def __init__(
        self,
        driver: Driver,
        binding: TorchBinding,
        tensor: torch.Tensor,
        *,
        pointer: int,
        device_index: int,
        imported: bytes | None = None,
        on_refused: Callable[[DriverBlock], None],
    ) -> None:
        self.nbytes = tensor.numel()
        self.pointer = pointer
        self.device_index = device_index
        self.imported = imported
        """The handle it was opened from; None for the owner."""
        self.exported: bytes | None = None
        """The handle it was exported as."""
        self._driver = driver
        self._binding = binding
        self._on_refused = on_refused
        self._tensor: torch.Tensor | None = tensor
        self._to_undo: list[Callable[[], None]] = []
        """What a close has still to do; empty while the block is open."""

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise DeviceError("this persistent block is closed; take views of it only while it is open")
        return self._tensor

    @property
    def is_closed(self) -> bool:
        return self._tensor is None

    def close(self) -> None:
        """See `PersistentBlock`. What fails does not keep the rest from being tried, and another call tries it again.

        Raises:
            DeviceError: the first call that the driver refused; `on_refused` has the block then.
            RuntimeError: torch could not wait for its work on the device; likewise.
        """
        if self._tensor is not None:
            self._tensor = None
            self._to_undo = self._undoing()
        if not self._to_undo:
            return
        try:
            self._undo()
        except (DeviceError, RuntimeError):
            self._on_refused(self)
            raise

    def _undo(self) -> None:
        self._driver.set_device(self.device_index)
        # A copy that still runs, or that torch has not launched yet, must not find its memory unmapped.
        self._binding.flush(self.device_index)
        self._driver.device_synchronize()
        left: list[Callable[[], None]] = []
        errors: list[DeviceError] = []
        for undo in self._to_undo:
            try:
                undo()
            except DeviceError as error:
                left.append(undo)
                errors.append(error)
        self._to_undo = left
        if errors:
            raise errors[0]

    def _undoing(self) -> list[Callable[[], None]]:
        if self.imported is not None:
            return [partial(self._driver.ipc_close, self.pointer, self.imported)]
        free = partial(self._driver.free, self.pointer)
        return [free] if self.exported is None else [partial(self._driver.ipc_unexport, self.exported), free]
