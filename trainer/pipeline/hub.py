"""Asks once, within seconds, whether the hub is there, before libraries ask it for half a minute a file.

What is in the cache of this machine already is left to them: they take it from there.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

from rollout.prompts.files import reader_of_suffix
from trainer.config.environment import looks_local
from trainer.config.errors import ConfigurationError, Problem
from trainer.config.model_paths import model_paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.config.schema import RunConfig

REACH_S = 5.0
"""For the first answer of the hub, name resolution included."""

_MODEL_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")


def check_hub(cfg: RunConfig) -> None:
    """Raises ConfigurationError if models, tokenizer or data sets have to be downloaded and the hub does not answer.

    With HF_HUB_OFFLINE set nothing is asked: who loads them says that it is set. On a cluster that is joined, models
    may be where the learners are: only what this process reads counts.
    """
    if constants.HF_HUB_OFFLINE:
        return
    models, data = _models_to_fetch(cfg), _data_to_fetch(cfg)
    if not models and not data:
        return
    reason = _why_silent(next(iter({**models, **data})))
    if reason is None:
        return
    raise ConfigurationError(
        [
            *(_problem(name, keys, "the model", "DIR", reason) for name, keys in models.items()),
            *(_problem(name, keys, "the data set", "FILE", reason) for name, keys in data.items()),
        ]
    )


def _problem(name: str, keys: Sequence[str], what: str, place: str, reason: str) -> Problem:
    return Problem(
        key=keys[0],
        got=name,
        allowed=f"{what} is not in the cache of this machine, and the hub cannot be reached: {reason}",
        do=f"check the network, or name a copy: {keys[0]}={place}; once it is cached, HF_HUB_OFFLINE=1 reads it there",
        also=tuple(keys[1:]),
    )


def _models_to_fetch(cfg: RunConfig) -> dict[str, list[str]]:
    """Name -> the keys that have it."""
    tokenizer = {"model.tokenizer_path": cfg.model.tokenizer_path}
    read_here = tokenizer if cfg.model.tokenizer_path else {"model.path": cfg.model.path}
    named = {**model_paths(cfg), **read_here} if cfg.ray.address == "local" else read_here
    return _by_name({key: name for key, name in named.items() if _is_of_hub(name) and not _is_model_cached(name)})


def _data_to_fetch(cfg: RunConfig) -> dict[str, list[str]]:
    """Name -> the keys that have it."""
    if cfg.task.reader not in {"auto", "hf"}:
        return {}
    named = {"task.train_path": cfg.task.train_path, **cfg.task.held_out_paths}
    of_hub = {key: name for key, name in named.items() if name and _is_of_hub(name) and reader_of_suffix(name) is None}
    return _by_name({key: name for key, name in of_hub.items() if not _is_data_cached(name.partition(":")[0])})


def _by_name(named: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, name in named.items():
        found.setdefault(name, []).append(key)
    return found


def _is_of_hub(name: str) -> bool:
    return not name.startswith("builtin:") and not looks_local(name)


def _is_model_cached(name: str) -> bool:
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _MODEL_FILES)


def _is_data_cached(name: str) -> bool:
    from datasets import config

    prepared = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")
    return prepared.is_dir() or isinstance(try_to_load_from_cache(name, "README.md", repo_type="dataset"), str)


def _why_silent(name: str) -> str | None:
    """Why the hub gives no answer at all about `name`; None if it gives any, a refusal included."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(f"{constants.ENDPOINT}/{name}", timeout=REACH_S)
        except Exception as error:  # noqa: BLE001 - which library it comes from depends on the version of the hub's
            answers.put(f"{constants.ENDPOINT}: {error}")
        else:
            answers.put(None)

    # No timeout of a connection covers name resolution, and a thread that waits for that must not keep us here.
    threading.Thread(target=ask, name="ask the hub", daemon=True).start()
    try:
        return answers.get(timeout=REACH_S)
    except queue.Empty:
        return f"{constants.ENDPOINT}: no answer within {REACH_S:g} s"
