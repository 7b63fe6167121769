"""The device layer: one `Backend` per kind of accelerator, and `get_backend` to choose one. See docs/backends.md."""

from weight_sync.device.base import Backend, Capabilities, IpcHandle, PersistentBlock, Role
from weight_sync.device.environment import EnvVar, merge_env
from weight_sync.device.select import get_backend
from weight_sync.errors import DeviceError

__all__ = [
    "Backend",
    "Capabilities",
    "DeviceError",
    "EnvVar",
    "IpcHandle",
    "PersistentBlock",
    "Role",
    "get_backend",
    "merge_env",
]
