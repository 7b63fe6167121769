"""Host memory that a device reads and writes by itself, without a buffer of its driver's in between."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weight_sync.device.driver import Driver

log = logging.getLogger(__name__)

STOP_S = 30.0
"""For the driver to end with the piece that it is at."""
_registered: set[Pinning] = set()
"""Holds the memory: what a driver has registered must not be unmapped."""
_refused_by: set[str] = set()


class Pinning:
    """Registers pieces of mapped memory with a driver, one after the other, in a thread.

    In a thread, because it takes 0.2 s per GB. Until a piece is registered, and if the driver refuses (the log says so
    once), copies of it are several times slower.
    """

    def __init__(
        self, driver: Driver, tensor: torch.Tensor, pieces: Sequence[tuple[int, int]], *, device_index: int, name: str
    ) -> None:
        """`pieces` are those of `Backend.pin`, in uint8 `tensor`."""
        self._driver = driver
        self._tensor = tensor
        self._device_index = device_index
        self._name = name
        self._addresses: list[int] = []
        """Of registered pieces."""
        self._num_pieces = len(pieces)
        self._is_stopped = False
        _registered.add(self)
        self._thread = threading.Thread(target=self._register, args=(pieces,), name="weight-sync-pin", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all pieces are registered, as soon as that is known or time is up."""
        self._thread.join(timeout_s)
        return len(self._addresses) == self._num_pieces

    def undo(self) -> None:
        """To be called before the memory is unmapped, when all copies of it are done."""
        self._is_stopped = True
        self._thread.join(STOP_S)
        try:
            if self._thread.is_alive():
                raise DeviceError(f"the driver has been pinning it for over {STOP_S:.0f} s")
            self._driver.set_device(self._device_index)
            while self._addresses:
                self._driver.host_unregister(self._addresses[-1])
                self._addresses.pop()
        except DeviceError as error:
            log.warning("%s: shared host memory stays mapped until this process ends: %s", self._name, error)
        else:
            _registered.discard(self)

    def _register(self, pieces: Sequence[tuple[int, int]]) -> None:
        try:
            self._driver.set_device(self._device_index)
            for start, nbytes in pieces:
                if self._is_stopped:
                    return
                address = self._tensor.data_ptr() + start
                self._driver.host_register(address, nbytes)
                self._addresses.append(address)
        except DeviceError as error:
            level = logging.DEBUG if self._name in _refused_by else logging.WARNING
            log.log(level, "%s: host memory cannot be pinned, so copies of it are slower: %s", self._name, error)
            _refused_by.add(self._name)
