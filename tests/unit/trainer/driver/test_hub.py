"""A hub that does not answer is told at once; what is in the cache, or on the machine, is none of its business."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from trainer.config.compose import load_config
from trainer.driver import models as hub
from trainer.driver.preflight import check_inputs
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "some/model"


class Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Accepts connections and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a hub that refuses connections."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    return address


def put_in_cache(folder: Path, file: str) -> None:
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / file).write_text("{}")


def test_a_hub_that_refuses_is_told_at_once_with_the_model_and_what_to_do(
    closed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = load_config([f"model.path={MODEL}"])
    began = time.monotonic()
    with pytest.raises(ConfigurationError) as refused:
        check_inputs(cfg)
    assert time.monotonic() - began < hub.REACH_S
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("model.path", MODEL)
    for words in ("hub cannot be reached", closed, "HF_HUB_OFFLINE=1", "model.path=DIR"):
        assert words in str(problem)
    assert "Retrying" not in capfd.readouterr().err


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setattr(hub, "REACH_S", 0.2)
    (problem,) = hub.hub_problems(load_config([f"model.path={MODEL}"]))
    assert "hub cannot be reached" in str(problem)


def test_a_hub_that_answers_is_there_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.handle_request)
    thread.start()
    assert not list(hub.hub_problems(load_config([f"model.path={MODEL}"])))
    thread.join()
    server.server_close()


def test_every_model_and_data_set_that_is_missing_is_named_once(closed: str) -> None:
    lines = [f"model.path={MODEL}", "model.tokenizer_path=some/tokenizer", "task=gsm8k", "algorithm.kl.coef=0.1"]
    problems = hub.hub_problems(load_config([*lines, "algorithm.kl.reference_model=some/teacher"]))
    got = {problem.key: problem.value for problem in problems}
    assert got == {
        "model.path": MODEL,
        "algorithm.kl.reference_model": "some/teacher",
        "model.tokenizer_path": "some/tokenizer",
        "task.train_path": "openai/gsm8k:main",
    }


def test_of_a_cluster_that_is_joined_only_what_is_read_here_has_to_be_here(closed: str, cache: Path) -> None:
    put_in_cache(cache / "hub" / "models--some--tokenizer", "tokenizer.json")
    assert not list(
        hub.hub_problems(
            load_config([f"model.path={MODEL}", "model.tokenizer_path=some/tokenizer", "ray.address=auto"])
        )
    )


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_model_in_the_cache_asks_no_hub(closed: str, cache: Path, file: str) -> None:
    put_in_cache(cache / "hub" / "models--some--model", file)
    assert not list(hub.hub_problems(load_config([f"model.path={MODEL}"])))


@pytest.mark.parametrize("folder", ["hub/datasets--openai--gsm8k", "datasets/openai___gsm8k"])
def test_a_data_set_in_the_cache_asks_no_hub(closed: str, cache: Path, folder: str) -> None:
    put_in_cache(cache / folder, "README.md")
    assert not list(hub.hub_problems(load_config(["task=gsm8k"])))


def test_what_is_built_in_or_a_file_asks_no_hub(closed: str, cache: Path) -> None:
    (cache / "mine.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    assert not list(hub.hub_problems(load_config([])))
    assert not list(hub.hub_problems(load_config(["task.train_path=mine.jsonl", "task.eval_path=mine.jsonl"])))


def test_offline_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not list(hub.hub_problems(load_config([f"model.path={MODEL}"])))
