"""The YAML files that can be composed: those that come with Tandem and those of the user."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import trainer
from trainer.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.resources.abc import Traversable

PACKAGE = "configs"


def packaged_configs() -> Traversable:
    """The folder of the `configs` package, in a checkout, an editable install or an installed wheel.

    Raises `ConfigurationError` if a package of the same name elsewhere hides it.
    """
    folder, home = files(PACKAGE), Path(str(trainer.__file__)).resolve().parents[1]
    if isinstance(folder, Path) and folder.resolve().parent != home:
        message = f"hides the package `configs` of Tandem in {home}"
        hint = "start from another directory, or take that one off PYTHONPATH"
        raise ConfigurationError([Problem(key="package `configs`", value=str(folder), message=message, hint=hint)])
    return folder


def config_names(folder: Traversable) -> list[str]:
    """Configurations that `--config-name` can name in `folder`, without the suffix."""
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def search_folders(config_dir: Path | None) -> list[Traversable]:
    """Where to look for configurations, the user's folder first. Raises `ConfigurationError` if that is no folder."""
    if config_dir is None:
        return [packaged_configs()]
    if not config_dir.is_dir():
        problem = Problem(key="--config-dir", value=str(config_dir), message="must be a folder with YAML files")
        raise ConfigurationError([problem])
    return [config_dir, packaged_configs()]


def groups(folders: Sequence[Traversable]) -> Mapping[str, list[str]]:
    """Groups and their options over all `folders`, e.g. {"device": ["auto", "cpu", ...]}."""
    found: dict[str, set[str]] = {}
    for entry in (entry for folder in folders for entry in folder.iterdir() if entry.is_dir()):
        if options := config_names(entry):
            found.setdefault(entry.name, set()).update(options)
    return {name: sorted(options) for name, options in sorted(found.items())}
