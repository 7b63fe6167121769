from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.fakes.ports import has_ipv6
from weight_sync import node as addresses
from weight_sync.node import HOST_VARIABLE, NODE_VARIABLE, node_id, reachable_host

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    monkeypatch.delenv(NODE_VARIABLE, raising=False)


class Routes:
    """A machine whose default routes leave from these addresses; loopback as usual."""

    def __init__(self, sources: dict[int, str]) -> None:
        self.sources = sources
        self.sent: list[bytes] = []

    def socket(self, family: int, kind: int) -> Routes:
        assert kind == socket.SOCK_DGRAM
        self.family = family
        return self

    def __enter__(self) -> Routes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        if self.family not in self.sources:
            raise OSError("network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return self.sources[self.family], 40000


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, str]]:
    sources: dict[int, str] = {}
    monkeypatch.setattr(addresses.socket, "socket", Routes(sources).socket)
    yield sources


@pytest.mark.parametrize(
    ("written", "host"),
    [*((host, host) for host in ("127.0.0.1", "127.0.0.2", "127.77.0.1")),
     *((written, "::1") for written in ("::1", "[::1]", "0:0:0:0:0:0:0:1"))],
)  # fmt: skip
def test_the_address_that_the_caller_knows_is_taken_however_it_is_written(written: str, host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this kernel has no IPv6 loopback")
    assert reachable_host(written) == host


def test_the_environment_wins_over_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "127.0.0.3")
    assert reachable_host("127.0.0.2") == "127.0.0.3"
    assert reachable_host() == "127.0.0.3"


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("node-7", "must be an IPv4 or IPv6 address"),
        ("127.0.0.1:80", "must be an IPv4 or IPv6 address"),
        ("203.0.113.9", "not an address of this machine"),
        ("0.0.0.0", "which means any"),
        ("::", "which means any"),
    ],
)
def test_an_address_that_nobody_could_listen_on_is_refused(
    host: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=why):
        reachable_host(host)
    monkeypatch.setenv(HOST_VARIABLE, host)
    with pytest.raises(ValueError, match=f"{HOST_VARIABLE}.*{why}"):
        reachable_host()


def test_the_default_route_is_taken_and_ipv4_before_ipv6(routes: dict[int, str]) -> None:
    routes[socket.AF_INET6] = "fd00::7"
    assert reachable_host() == "fd00::7"
    routes[socket.AF_INET] = "10.1.2.3"
    assert reachable_host() == "10.1.2.3"


@pytest.mark.parametrize("useless", ["fe80::1%eth0", "::", "0.0.0.0", "169.254.3.4"])
def test_without_a_usable_route_it_is_loopback(useless: str, routes: dict[int, str]) -> None:
    assert reachable_host() == "127.0.0.1"
    routes[socket.AF_INET6 if ":" in useless else socket.AF_INET] = useless
    assert reachable_host() == "127.0.0.1"


def test_what_is_found_here_can_be_listened_on() -> None:
    host = reachable_host()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((host, 0))
        server.listen()
        with socket.create_connection((host, server.getsockname()[1]), timeout=5):
            pass


def test_processes_of_one_host_have_one_node_id_whatever_they_are_called() -> None:
    code = "from weight_sync.node import node_id; print(node_id())"
    environ = {**os.environ, "HOSTNAME": "other", HOST_VARIABLE: "127.0.0.9"}
    found = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True, timeout=60).strip()
    assert len(found) == 16
    assert found == node_id()


@pytest.mark.parametrize("fact", range(4))
def test_another_kernel_namespace_or_user_is_another_node(fact: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = node_id()
    facts = addresses._kernel_facts()
    facts[fact] += "x"
    monkeypatch.setattr(addresses, "_kernel_facts", lambda: facts)
    assert node_id() != here


def test_a_named_node_is_where_the_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    here = node_id()
    monkeypatch.setenv(NODE_VARIABLE, "a")
    named = node_id()
    assert named not in {here, "a"}
    assert node_id() == named
    monkeypatch.setenv(NODE_VARIABLE, "b")
    assert node_id() not in {here, named}
