"""The command line: options, help text, and advice for options of other programs."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from trainer.config.field import value_text
from trainer.config.plain import suggestion
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.schema import all_keys
from trainer.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence


DEFAULT_CONFIG = "tiny"

_LOOP = "write a loop: for value in 1 2 3; do python -m trainer seed=$value run_dir=runs/$value; done"
_OWN_FOLDER = "a folder with your own YAML files is --config-dir DIR"
_ADVICE = {
    "-m": _LOOP,
    "--multirun": _LOOP,
    "-cp": _OWN_FOLDER,
    "--config-path": _OWN_FOLDER,
    "--resume": "the same command with the same run_dir=PATH resumes; another checkpoint is checkpoint.resume=PATH",
    "--dryrun": "write --dry-run",
}
"""What is meant by options of other programs."""

Action = Literal["run", "dry_run", "show_config", "help", "version"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The parsed command line. `overrides` are in the order they were given."""

    action: Action
    config_name: str
    config_dir: Path | None
    overrides: tuple[str, ...]
    device_memory_gib: float | None = None
    """Of a device that a dry run plans for; None asks this machine."""
    response_tokens: float | None = None
    """Mean length of the responses that a dry run plans for; None if that is not known."""
    nodes: tuple[int, ...] | None = None
    """Devices of every node that a dry run places all actors on; None places none."""


class _Parser(argparse.ArgumentParser):
    words: Sequence[str] = ()
    """The command line."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split() if "unrecognized" in message else []
        hints = [_ADVICE[word] for word in unknown if word in _ADVICE]
        hints += [_as_key(word, self.words) for word in unknown if word.startswith("--")]
        hint = next(filter(None, hints), "see python -m trainer --help")
        raise ConfigurationError([Problem(key="command line", value="", message=message, hint=hint)])


def _as_key(option: str, words: Sequence[str]) -> str:
    """How to set the key that an option of another program stands for; empty if it is like no key."""
    name, equals, value = option.lstrip("-").partition("=")
    if not equals:
        rest = words[words.index(option) + 1 :] if option in words else ()
        value = rest[0] if rest and not rest[0].startswith("--") and "=" not in rest[0] else "VALUE"
    key = name.replace("-", "_")
    meant = key if key in all_keys() else suggestion(key).removeprefix("did you mean ").removesuffix("?")
    return f"keys have no dashes: {meant if meant else key}={value}" if equals or meant else ""


def parse(argv: Sequence[str]) -> CommandLine:
    """Raises `ConfigurationError` for an option that does not exist or lacks its value."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.words = argv
    parser.add_argument("--config-name", "-cn", default=DEFAULT_CONFIG)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cfg", "-c", choices=["job"], dest="show_config")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--device-memory-gib", type=float)
    parser.add_argument("--response-tokens", type=float)
    parser.add_argument("--nodes")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(list(argv))
    actions: tuple[Action, ...] = ("help", "version", "show_config", "dry_run")
    chosen: list[Action] = [one for one in actions if getattr(args, one)]
    action: Action = chosen[0] if chosen else "run"
    _check_planned("--device-memory-gib", args.device_memory_gib, "for other devices", action)
    _check_planned("--response-tokens", args.response_tokens, "for responses of another length", action)
    return CommandLine(
        action=action,
        config_name=str(args.config_name).removesuffix(".yaml"),
        config_dir=args.config_dir,
        overrides=tuple(args.overrides),
        device_memory_gib=args.device_memory_gib,
        response_tokens=args.response_tokens,
        nodes=_nodes(args.nodes, action),
    )


def _check_planned(option: str, given: float | None, what: str, action: Action) -> None:
    if given is None or (action == "dry_run" and 0 < given < math.inf):
        return
    message = "must be > 0" if action == "dry_run" else f"plans {what}; only --dry-run plans"
    raise ConfigurationError([Problem(key=option, value=f"{given:g}", message=message)])


def _nodes(given: str | None, action: Action) -> tuple[int, ...] | None:
    if given is None:
        return None
    counts = given.split(",")
    if action == "dry_run" and all(re.fullmatch(r"[0-9]+", count) for count in counts) and any(map(int, counts)):
        return tuple(map(int, counts))
    message, hint = "plans for other nodes; only --dry-run plans", "a run asks Ray for its nodes: ray.address"
    if action == "dry_run":
        message = "must be integers with commas between them, not all 0"
        hint = "list the devices of each node, the driver's node first: --nodes 8,8,8, or 0,8,8 if that has none"
    raise ConfigurationError([Problem(key="--nodes", value=given, message=message, hint=hint)])


_MOST_USED = (
    "run_dir", "seed", "model.path", "task.train_path", "task.eval_path", "task.reward.name", "mode.max_staleness",
    "rollout.group_size", "rollout.max_response_tokens", "rollout.num_replicas", "rollout.tensor_parallel_size",
    "learner.num_ranks", "learner.lr", "weight_sync.transport", "trainer.total_steps", "trainer.groups_per_step",
    "trainer.eval_every", "checkpoint.every_steps", "checkpoint.resume",
)  # fmt: skip

_TEXT = """\
Tandem trains a language model with reinforcement learning: learners (FSDP2) and engines (vLLM) run at the same time.

Usage:
  python -m trainer [--config-name NAME] [--config-dir DIR] [GROUP=OPTION ...] [KEY=VALUE ...]
  python -m trainer TOOL ...                one of the tools below; TOOL --help has more
  tandem ...                                the same, also where the working directory has a trainer.py

Options:
  --config-name NAME   configuration to start from (default: {default}); there are: {names}
  --config-dir DIR     folder with your own YAML files; they come before those of Tandem
  --cfg job            print the resolved configuration and stop
  --dry-run            print placement, memory per device and traffic, refuse what cannot fit, start nothing
  --device-memory-gib N  with --dry-run: plan for devices of N GiB; devices and vLLM of this machine are not looked at
  --response-tokens N  with --dry-run: mean length of the responses, for the expected bottleneck
  --nodes N,N,...      with --dry-run: devices of each node, the driver's first; print which node has which actors
  --help               print this text and stop
  --version            print the version and stop

Groups (GROUP=OPTION; keys in the file of --config-name itself win over the group):
{groups}

Most used keys (KEY=VALUE), with the default that holds where the configuration sets nothing else:
{keys}
All keys: docs/configuration.md. Keys of an open section are added with a plus: +rollout.engine_args.NAME=VALUE

Examples:
  python -m trainer
  python -m trainer mode.max_staleness=2 run_dir=/tmp/my_run
  python -m trainer --config-name grpo_7b task=math mode.max_staleness=2
  python -m trainer --config-dir my_configs --config-name my_run learner.lr=3e-6
  python -m trainer task.train_path=train.jsonl task.eval_path=test.jsonl task.reward.name=my_reward.py:score
  python -m trainer algorithm.loss=my_package.losses.my_loss      (docs/add_a_loss.md; python -m trainer check)

Tools:
  advise RUN_DIR       which side of a run waits for the other, and what to change
  bench                runs of one workload in several modes, compared; bench learner: steps of the learner alone
  check KIND FUNCTION  try your own loss, advantage, group filter or reward against its contract
  doctor               whether this node has what a run needs
  export RUN_DIR OUT   a checkpoint as a Hugging Face model
  sleep MODEL          whether an engine that sleeps gives its device memory back
  view RUN_DIR         what was sampled: prompts, responses and rewards

Exit codes:
  0  done
  1  failed; the first cause is the last line on the screen
  2  the configuration, the model or the data cannot be used
  130  interrupted; saved, if training had begun and it was interrupted once
  141  the output is closed (--help | head)
"""


def help_text() -> str:
    folder = packaged_configs()
    options = groups([folder])
    width = max(len(name) for name in options)
    return _TEXT.format(
        default=DEFAULT_CONFIG,
        names=", ".join(config_names(folder)),
        groups="\n".join(f"  {name:<{width}}  {', '.join(values)}" for name, values in options.items()),
        keys="\n".join(_key_text(path) for path in _MOST_USED),
    )


def _key_text(path: str) -> str:
    info = all_keys()[path]
    doc = textwrap.fill(info.doc, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {path}={value_text(info.default)}   ({info.kind})\n{doc}"
