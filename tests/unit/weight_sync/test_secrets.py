"""The secret of a run signs every control frame; it must not be found in a log, a representation or an error."""

from __future__ import annotations

import base64
import contextlib
import logging
from typing import Any

import msgspec
import pytest

from tests.fakes.sync_world import LocalPublisher, LocalReplica, full_weights
from weight_sync import channel as control
from weight_sync import messages as wire
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.errors import WeightSyncError
from weight_sync.messages import OpenPublisher, OpenReceiver, decode

SECRET = bytes(range(65, 97))
"""Letters, so that it would show however it is printed."""


def spellings(secret: bytes) -> list[str]:
    return [
        secret.decode("latin-1"), repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode(),
        str(list(secret)), secret[:8].decode("latin-1"),
    ]  # fmt: skip


class Eavesdropper:
    """A party that keeps what it is sent."""

    def __init__(self, party: Any) -> None:
        self._party = party
        self.rank, self.name = getattr(party, "rank", None), getattr(party, "name", None)
        self.heard: dict[str, bytes] = {}

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if args and isinstance(args[0], bytes):
            self.heard[method] = args[0]
        return await self._party.call(method, *args, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._party, name)


async def test_secret_is_in_no_log_of_opening_syncing_and_failing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("secrets.token_bytes", lambda size: SECRET[:size] if size == 32 else bytes(size))
    replica = LocalReplica("r0")
    publisher, receiver = Eavesdropper(LocalPublisher(0, 1, full_weights(0))), Eavesdropper(replica)
    coordinator = SyncCoordinator([publisher], [receiver], options=SyncOptions(timeout_s=5.0, commit="staged"))
    monkeypatch.setattr("secrets.token_bytes", __import__("os").urandom)
    await coordinator.open()
    await coordinator.publish(1)
    await coordinator.sync(1)

    def fail() -> None:
        raise RuntimeError("the engine is gone")

    replica.before_commit = fail
    await coordinator.publish(2)
    with contextlib.suppress(WeightSyncError):
        await coordinator.sync(2)
    await coordinator.close()
    opening = decode(publisher.heard["ws_open"], OpenPublisher)
    assert opening.secret == SECRET, "this test does not know the secret"
    assert caplog.records
    printed = "".join(capfd.readouterr()) + caplog.text
    texts = [printed, repr(opening), str(opening), repr(decode(receiver.heard["ws_open"], OpenReceiver)),
             repr(coordinator), repr(vars(coordinator))]  # fmt: skip
    for text in texts:
        assert not [spelling for spelling in spellings(SECRET) if spelling in text], text[:300]


def structs_with_secrets() -> list[type[Any]]:
    modules = (wire, control)
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    structs = [kind for kind in kinds if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct]
    return sorted((kind for kind in structs if "secret" in kind.__struct_fields__), key=lambda kind: kind.__name__)


def test_there_are_messages_that_carry_the_secret() -> None:
    assert {"OpenPublisher", "OpenReceiver"} <= {kind.__name__ for kind in structs_with_secrets()}


@pytest.mark.parametrize("kind", structs_with_secrets(), ids=lambda kind: kind.__name__)
def test_message_that_carries_the_secret_does_not_show_it(kind: type[Any]) -> None:
    fields = dict.fromkeys(kind.__struct_fields__)
    message = kind(**{**fields, "run_id": "run", "epoch": 1, "manifest": b"", "secret": SECRET})
    assert not [spelling for spelling in spellings(SECRET) if spelling in repr(message)], repr(message)
    assert "run_id" in repr(message), "the rest helps whoever debugs"
