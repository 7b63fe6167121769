"""Where learner ranks meet."""

from __future__ import annotations

import re
import socket

import pytest

from tests.fakes.ports import free_port
from trainer.errors import LearnerError
from trainer.learner.fsdp import Rendezvous


def test_ranks_meet_at_the_port_that_was_asked_for() -> None:
    port = free_port()
    first = Rendezvous.host_at("127.0.0.1", port=port, world_size=2, timeout_s=10.0)
    assert first.port == port
    second = Rendezvous.join("127.0.0.1", port, world_size=2, timeout_s=10.0)
    first.store.set("greeting", "hello")
    assert second.store.get("greeting") == b"hello"


def test_port_zero_takes_free_ports() -> None:
    meetings = [Rendezvous.host_at("127.0.0.1", port=0, world_size=1, timeout_s=10.0) for _ in range(2)]
    assert 0 not in {meeting.port for meeting in meetings}
    assert meetings[0].port != meetings[1].port


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = re.escape(f"learner.port={port} cannot be bound on 127.0.0.1: ") + ".*or 0 for a free one"
        with pytest.raises(LearnerError, match=expected):
            Rendezvous.host_at("127.0.0.1", port=port, world_size=1, timeout_s=10.0)
