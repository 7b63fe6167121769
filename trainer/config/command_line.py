"""What may stand behind `python -m trainer`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from trainer.config.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_CONFIG = "tiny"

Action = Literal["run", "show_config", "help", "version"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The parsed command line. `overrides` are in the order they were given."""

    action: Action
    config_name: str
    config_dir: Path | None
    overrides: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(
            [Problem(key="command line", got="", allowed=message, do="see python -m trainer --help")]
        )


def parse(argv: Sequence[str]) -> CommandLine:
    """Raises `ConfigurationError` for an option that does not exist or lacks its value."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default=DEFAULT_CONFIG)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(list(argv))
    action: Action = "run"
    if args.help:
        action = "help"
    elif args.version:
        action = "version"
    elif args.cfg:
        action = "show_config"
    return CommandLine(
        action=action,
        config_name=str(args.config_name).removesuffix(".yaml"),
        config_dir=args.config_dir,
        overrides=tuple(args.overrides),
    )
