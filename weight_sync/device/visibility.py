"""Which devices a process sees, where Ray does not set that itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from weight_sync.device.select import build
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weight_sync.device.base import Backend


class Ray(Protocol):
    """What is asked of the module `ray`, which this package does not import."""

    def get_runtime_context(self) -> Any: ...

    def nodes(self) -> list[dict[str, Any]]: ...


def show_own_devices(device: str, ray: Ray) -> None:
    """Show this process, an actor, the devices that Ray counts as its own before the others of its host.

    Call it before anything that asks the driver: a driver reads the variable once, when it is first called. Nothing
    happens on a backend for which Ray sets the variable, nor in an actor without devices of its own, which is told by
    its environment what to share.

    Raises:
        DeviceError: the variable is set already, and leaves out a device that Ray has given this process.
    """
    if device == "auto":
        return
    backend = build(device)
    if backend.ray_shows_devices or backend.ray_resource is None:
        return
    context = ray.get_runtime_context()
    own = context.get_accelerator_ids().get(backend.ray_resource, [])
    (here,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    num_devices = int(here["Resources"].get(backend.ray_resource, 0))
    os.environ.update(shown(backend, own, num_devices=num_devices, environ=os.environ))


def shown(backend: Backend, own: Sequence[str], *, num_devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows a process all devices that it may see, its own first.

    Args:
        own: ids of its devices: numbers, or, where the variable is inherited, some of what it lists.
        num_devices: of the host, for a variable that is not inherited.

    Example: `["2"]` of 4 -> `2,0,1,3`; `["5"]` with `4,5` inherited -> `5,4`
    """
    variable = backend.visible_devices_var
    if variable is None or not own:
        return {}
    inherited = environ.get(variable)
    there = [str(index) for index in range(num_devices)] if inherited is None else inherited.split(",")
    if missing := sorted(set(own) - set(there)):
        raise DeviceError(
            f"Ray has given this process the {backend.name} devices {', '.join(own)}, and {variable}={inherited} "
            f"leaves out {', '.join(missing)}; set it before `ray start`, or not at all, and not in `device.env`"
        )
    indices = backend.visible_devices(tuple(sorted(there.index(device) for device in own)), len(there)).split(",")
    text, alias = ",".join(there[int(index)] for index in indices), backend.visible_devices_alias
    if alias is not None and inherited is not None and environ.get(alias) == inherited:
        return {variable: text, alias: text}
    return {variable: text}
