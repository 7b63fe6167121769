"""Which files of a directory are a model's weights, and which directories are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from tests.fakes.scripted_run import config
from trainer.config.schema import ModelConfig
from trainer.errors import ModelError
from trainer.learner.model import meta_model
from trainer.learner.weights import check_weights, checkpoint_files, has_weights, is_random_init, resolve_model_dir

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, *names: str) -> Path:
    save_file({name: torch.zeros(1) for name in names}, path)
    return path


def test_missing_directory_says_what_to_give(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(
        ModelError, match=r"^model.path '/.*/absent' is not a directory; give a Hugging Face model dire"
    ):
        resolve_model_dir(absent, key="model.path")
    with pytest.raises(ModelError, match=r"^critic.path '.*' has no config\.json \(found \[\]\)"):
        resolve_model_dir(str(tmp_path), key="critic.path")


@pytest.mark.parametrize(("name", "key"), [("own/policy", "model.path"), ("own/critic", "critic.path")])
def test_a_name_that_the_hub_has_not_is_told_with_its_key(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(_name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    cfg = config(model={"path": "own/policy"}, critic={"path": "own/critic"})
    with pytest.raises(ModelError, match=f"^{key} '{name}' is neither a directory here nor a model the hub gives us"):
        meta_model(name, cfg)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors", "any.safetensors"])
def test_safetensors_of_any_name_are_weights(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, "a", "b")
    assert checkpoint_files(tmp_path) == {"a": path, "b": path}
    check_weights(tmp_path, is_random_init=False)
    with pytest.raises(ModelError, match=r"has weights, which model\.random_weights=true would not read"):
        check_weights(tmp_path, is_random_init=True)


def test_a_directory_without_weights_is_for_drawing_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "consolidated.00.pth").touch()
    check_weights(tmp_path, is_random_init=True)
    with pytest.raises(ModelError, match=r"no weights \(found \['config\.json', 'consolidated.*random_weights=true"):
        check_weights(tmp_path, is_random_init=False)
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    assert has_weights(tmp_path)


def test_files_that_both_hold_a_tensor_are_refused_without_an_index(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", "a", "b")
    write(tmp_path / "model-00002-of-00002.safetensors", "b", "c")
    with pytest.raises(
        ModelError, match=r"00001-of-00002\.safetensors and model-\d+-of-00002\.safetensors both hold b"
    ):
        checkpoint_files(tmp_path)


def test_a_numbered_file_that_is_missing_is_an_unfinished_download(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00003.safetensors", "a")
    write(tmp_path / "model-00003-of-00003.safetensors", "c")
    with pytest.raises(ModelError, match=r"has 2 of the 3 files model-\*-of-\*\.safetensors; finish the download"):
        check_weights(tmp_path, is_random_init=False)


def test_only_the_policy_is_drawn(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path / "policy"), random_weights=True)
    assert is_random_init(model, tmp_path / "policy") and not is_random_init(model, str(tmp_path / "critic"))
    assert not is_random_init(ModelConfig(path=str(tmp_path)), tmp_path)


@pytest.mark.parametrize(("weights", "num_asked"), [("model.safetensors", 1), ("pytorch_model.bin", 2)])
def test_a_hub_model_without_safetensors_comes_with_its_other_weights(
    weights: str, num_asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot_download(_name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        (tmp_path / "config.json").touch()
        if any((tmp_path / weights).match(pattern) for pattern in allow_patterns):
            (tmp_path / weights).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert (resolve_model_dir("owner/name", key="model.path") / weights).exists()
    assert len(asked) == num_asked
