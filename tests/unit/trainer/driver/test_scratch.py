"""Where Ray's files lie while a run lasts."""

from __future__ import annotations

import tempfile

import pytest

from trainer.driver import cluster

LONGEST_SOCKET = "/tandem-ray-4194304-abcdefgh/session_2026-11-20_19-19-38_041629_4194304/sockets/plasma_store"
SOCKET_PATH_LIMIT = 107


@pytest.mark.parametrize("home", ["/tmp", "/var/tmp", "/scratch/someone/job.123456", "/" + "x" * 13, "/" + "x" * 14])
def test_a_socket_of_ray_fits_below_any_temporary_directory(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: home)
    assert len(cluster._scratch_home() + LONGEST_SOCKET) <= SOCKET_PATH_LIMIT
    assert cluster._scratch_home() in (home, "/tmp")


def test_a_short_temporary_directory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/var/tmp")
    assert cluster._scratch_home() == "/var/tmp"
