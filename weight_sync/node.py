"""Where this process is: its node, and the address under which others reach it.

Two environment variables override what is found, both read when the functions are called:

- `TANDEM_HOST`: an IPv4 or IPv6 address of this machine, for hosts with several networks.
- `TANDEM_NODE`: any text; processes with the same text count as one node. For hosts that look alike (virtual machines
  resumed from one snapshot), and to try several nodes on one machine.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from pathlib import Path

HOST_VARIABLE = "TANDEM_HOST"
NODE_VARIABLE = "TANDEM_NODE"
_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses reserved for documentation (RFC 5737, RFC 3849): nobody has them, so the default route leads there."""
_LOOPBACK = "127.0.0.1"


def reachable_host(preferred: str | None = None) -> str:
    """An address, IPv4 or IPv6, that other nodes can reach this process at and that it can listen on.

    The first of: `TANDEM_HOST`; `preferred` (the node address that a cluster manager knows, say Ray's); the address of
    the interface with the default route, IPv4 first; loopback, on a machine without a network. Nothing is sent.

    Raises:
        ValueError: `TANDEM_HOST` or `preferred` is no address, or none of this machine.

    Example: `reachable_host("10.0.0.7")` -> `"10.0.0.7"` on the machine that has it.
    """
    override = os.environ.get(HOST_VARIABLE)
    if override:
        return _own_address(override, HOST_VARIABLE)
    if preferred is not None:
        return _own_address(preferred, "the preferred address")
    found = (_source_address(family, far) for family, far in _FAR_AWAY)
    return next((host for host in found if host is not None), _LOOPBACK)


def node_id() -> str:
    """Equal in two processes exactly if they can map each other's memory, host memory and devices alike. 16 hex digits.

    It is a digest of what that depends on: the running kernel (its boot id), the process-id namespace (memory is opened
    through `/proc/<pid>/fd`, and drivers ask whether the exporting process lives), the IPC namespace (device memory is
    shared through it), and the user (other users' memory may not be opened). Containers of one host are therefore
    different nodes, unless they share both namespaces. Network and mount namespaces do not matter: memory needs neither
    an address nor a path. The hostname does not either: it can change, and hosts may have the same.

    If hosts that are not one still look so, opening the first block fails there, and with it the relay, not the sync.
    """
    override = os.environ.get(NODE_VARIABLE)
    facts = ["named", override] if override else ["found", *_kernel_facts()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _kernel_facts() -> list[str]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    # Without /proc there is nothing better than the name of the host.
    kernel = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return [kernel, _namespace("pid"), _namespace("ipc"), str(os.geteuid())]


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""


def _own_address(text: str, what: str) -> str:
    """`text` in its shortest form, once a socket could be bound to it."""
    bare = text.strip().removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError as error:
        raise ValueError(f"{what} must be an IPv4 or IPv6 address, got {text!r}; names are not resolved") from error
    if address.is_unspecified:
        raise ValueError(f"{what} must be an address that others can connect to, got {text!r}, which means any address")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        raise ValueError(
            f"{what} is {text!r}, which is not an address of this machine ({error.strerror}); set {HOST_VARIABLE} to "
            "one of its own addresses (`ip addr` lists them) or leave it unset"
        ) from error
    return str(address)


def _source_address(family: socket.AddressFamily, far: str) -> str | None:
    """The address this machine would send from to `far`; None without a route. Connecting a datagram socket only looks
    the route up."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            address = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except OSError:
        return None
    # A link-local address means nothing without the name of an interface, which differs between hosts.
    return None if address.is_unspecified or address.is_link_local else str(address)
