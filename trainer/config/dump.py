"""The resolved configuration as YAML: what is written to the run directory and shown by `--cfg job`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from trainer.config.convert import to_plain

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig


def dump_yaml(config: RunConfig) -> str:
    """Every key with its value, in the order of the schema. Loading the text gives the same configuration."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=120)
