"""Paths that are relative for the driver name the same files in actors, which may be started in another directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.scripted_run import config
from trainer.config.algorithm import KlConfig
from trainer.driver import actors as compose
from trainer.driver.actors import Actors, for_actors
from trainer.driver.checkpointing import find_resume_point
from trainer.driver.placement import plan_placement
from trainer.learner import checkpoint
from weight_sync.device.select import get_backend


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model, a tokenizer and a reward in it."""
    for name in ("models/policy", "models/critic", "models/teacher", "tokenizer"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "judge.py").write_text("def score(*, prompt, response, answer, metadata):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


RELATIVE = {
    "model": {"path": "models/policy", "tokenizer_path": "./tokenizer"},
    "critic": {"path": "models/critic"},
    "algorithm": {"kl": KlConfig(reference_model="models/teacher")},
}


def with_reward(name: str, **sections: dict[str, Any]) -> Any:
    return config(**sections, task={"reward": config().task.reward.__class__(name=name)})


async def test_every_kind_of_actor_gets_absolute_paths(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def kind(name: str) -> Any:
        actor = SimpleNamespace(remote=lambda first, *_, **__: made.update({name: first}))
        return lambda: SimpleNamespace(options=lambda **_: actor)

    for name in ("learner_actor", "engine_actor", "rollout_worker_actor"):
        monkeypatch.setattr(compose, name, kind(name))
    cfg = with_reward("judge.py:score", **RELATIVE)
    placement = plan_placement(cfg, resource=None)
    await compose.create_actors(cfg, placement, get_backend("cpu"), version=0)
    compose.with_workers(cfg, placement, Actors(learner=None, engines={"replica_0": None}, workers=[]))  # type: ignore[arg-type]
    learner, engine, worker = made["learner_actor"], made["engine_actor"], made["rollout_worker_actor"]
    policy, tokenizer = str(here / "models/policy"), str(here / "tokenizer")
    assert (learner.model.path, learner.model.tokenizer_path) == (policy, tokenizer)
    assert learner.critic.path == str(here / "models/critic")
    assert learner.algorithm.kl.reference_model == str(here / "models/teacher")
    assert (engine.model, engine.tokenizer) == (policy, tokenizer)
    assert (worker.tokenizer_path, worker.reward) == (tokenizer, f"{here}/judge.py:score")
    assert worker.reward_directory == str(here), "rows may name rewards too"


@pytest.mark.parametrize("name", ["math", "my_package.judges.score", "my_package.judges:score"])
def test_what_is_no_path_here_stays_as_it_is(name: str) -> None:
    cfg = with_reward(
        name,
        model={"path": "org/model"},
        critic={"path": "org/critic"},
        algorithm={"kl": KlConfig(reference_model="org/t")},
    )
    assert for_actors(cfg) == cfg


def test_the_built_in_model_is_absolute_before_it_is_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", "cache")
    cfg = for_actors(config(algorithm={"kl": KlConfig(reference_model="builtin:tiny")}))
    assert Path(cfg.model.path).parent == here / "cache"
    assert cfg.algorithm.kl.reference_model == cfg.model.path


def test_learners_are_told_of_a_checkpoint_by_its_absolute_path(here: Path) -> None:
    tmp = checkpoint.begin(Path("run/checkpoints"), 5)
    checkpoint.commit(tmp, {"run": {"step": 5}})
    found = find_resume_point(config(), Path("run/checkpoints"))
    assert found is not None
    assert found.path == here / "run" / "checkpoints" / "step_5"
