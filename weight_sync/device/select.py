"""Which backend, by name; which devices of its host a process sees, and which of those are its own.

Vendor modules are imported here on first use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weight_sync.device.base import Backend

AUTO_ORDER = ("cuda", "rocm", "npu", "cpu")
"""`auto` takes the first of these that is available."""
INSTALL = 'pip install -e ".[cpu]" (or [cuda]), or scripts/install.sh rocm or npu'
"""What installs Tandem with the vLLM of a kind of hardware."""
FIRST_VLLM = {"rocm": (0, 19)}
"""By a word in the label of a build (0.25.1+rocm723): the oldest vLLM that is taken, where it is older than elsewhere.
None of these older ones has been run."""


def get_backend(name: str = "auto", *, cpu_threads: int = 1) -> Backend:
    """The backend called `name` (auto | cpu | cuda | rocm | npu).

    `cpu_threads` is the number of compute threads per process on `cpu`; accelerators ignore it.

    Raises:
        DeviceError: unknown name, or the backend cannot run here (the message says what is missing and what to do).
    """
    if name == "auto":
        return next(backend for backend in (build(each, cpu_threads) for each in AUTO_ORDER) if backend.is_available())
    backend = build(name, cpu_threads)
    reason = backend.unavailable_reason()
    if reason is not None:
        raise DeviceError(f"device {name!r} was asked for but cannot be used: {reason}")
    return backend


def names_by_resource() -> dict[str, list[str]]:
    """What Ray calls a device -> the backends whose devices it calls so."""
    found: dict[str, list[str]] = {}
    for name in AUTO_ORDER:
        resource = build(name).ray_resource
        if resource is not None:
            found.setdefault(resource, []).append(name)
    return found


def build(name: str, cpu_threads: int = 1) -> Backend:
    """The backend object called `name`, whether or not it can run here (its environment rules always can be read)."""
    match name:
        case "cpu":
            from weight_sync.device.cpu import CpuBackend

            return CpuBackend(threads=cpu_threads)
        case "cuda":
            from weight_sync.device.cuda import CudaBackend

            return CudaBackend()
        case "rocm":
            from weight_sync.device.rocm import RocmBackend

            return RocmBackend()
        case "npu":
            from weight_sync.device.npu import NpuBackend

            return NpuBackend()
        case _:
            raise DeviceError(f"device must be one of auto, {', '.join(sorted(AUTO_ORDER))}, got {name!r}")


class Ray(Protocol):
    """What is asked of the module `ray`, which this package does not import."""

    def get_runtime_context(self) -> Any: ...

    def nodes(self) -> list[dict[str, Any]]: ...


def take_devices(device: str, ray: Ray, *, own: Sequence[str] = (), own_first: bool = False) -> tuple[int, ...]:
    """Show this process, an actor, its devices.

    Call it before anything asks the driver: a driver reads the variable once, when it is first called.

    Args:
        own: ids of devices that the actor shares with others; empty for those that Ray gave it.
        own_first: where it sees others too, its own come first, for a program that counts from 0.

    Returns:
        The places of its devices among those it sees. Empty if Ray gave it none, or shows it nothing else.

    Raises:
        DeviceError: the variable is set already, and leaves out one of its devices.
    """
    if device == "auto":
        return ()
    backend = build(device)
    num_devices = 0
    if backend.sees_whole_host:
        context = ray.get_runtime_context()
        own = own if own else sorted(context.get_accelerator_ids().get(backend.ray_resource, []))
        (here,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        num_devices = int(here["Resources"].get(backend.ray_resource, 0))
    variables, places = seen_devices(backend, own, num_devices=num_devices, environ=os.environ, own_first=own_first)
    os.environ.update(variables)
    return places


def seen_devices(
    backend: Backend, own: Sequence[str], *, num_devices: int, environ: Mapping[str, str], own_first: bool = False
) -> tuple[dict[str, str], tuple[int, ...]]:
    """Variables that show a process its devices, and the places of these among what it then sees.

    Args:
        own: ids of its devices: numbers, or, where the variable is inherited, some of what it lists.
        num_devices: of the host, for a variable that is not inherited.
        own_first: see `take_devices`.

    Example: `["2"]` of 4 -> `({}, (2,))` where handles name devices of the host, and `({"...": "2"}, (0,))` elsewhere
    """
    variable = backend.visible_devices_var
    if variable is None or not own:
        return {}, ()
    if not backend.sees_whole_host:
        return {variable: ",".join(own)}, tuple(range(len(own)))
    inherited = environ.get(variable)
    there = [str(index) for index in range(num_devices)] if inherited is None else inherited.split(",")
    if missing := sorted(set(own) - set(there)):
        raise DeviceError(
            f"Ray has given this process the {backend.name} devices {', '.join(own)}, and {variable}={inherited} "
            f"leaves out {', '.join(missing)}; set it before `ray start`, or not at all, and not in `device.env`"
        )
    if not own_first:
        return {}, tuple(there.index(device) for device in own)
    text, alias = ",".join(dict.fromkeys([*own, *there])), backend.visible_devices_alias
    names = [variable] if alias is None or environ.get(alias) != inherited or inherited is None else [variable, alias]
    return dict.fromkeys(names, text), tuple(range(len(own)))
