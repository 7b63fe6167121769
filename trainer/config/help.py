"""The text of `python -m trainer --help`."""

from __future__ import annotations

import textwrap

from trainer.config.command_line import DEFAULT_CONFIG
from trainer.config.describe import all_keys, bounds_text, type_text, value_text
from trainer.config.library import config_names, groups, packaged_configs

_MOST_USED = (
    "run_dir",
    "seed",
    "model.path",
    "task.train_path",
    "task.eval_path",
    "task.reward.name",
    "mode.max_staleness",
    "rollout.group_size",
    "rollout.max_response_tokens",
    "rollout.num_replicas",
    "rollout.tensor_parallel_size",
    "learner.num_ranks",
    "learner.lr",
    "weight_sync.transport",
    "trainer.total_steps",
    "trainer.groups_per_step",
    "trainer.eval_every",
    "checkpoint.every_steps",
    "checkpoint.resume",
)

_TEXT = """\
Tandem trains a language model with reinforcement learning: learners (FSDP2) and engines (vLLM) run at the same time.

Usage:
  python -m trainer [--config-name NAME] [--config-dir DIR] [GROUP=OPTION ...] [KEY=VALUE ...]
  tandem ...                                the same, also where the working directory has a trainer.py
  tandem advise|bench|check|export ...      trainer.advise, trainer.bench, trainer.check_plugin and trainer.export

Options:
  --config-name NAME   configuration to start from (default: {default}); there are: {names}
  --config-dir DIR     folder with your own YAML files; they come before those of Tandem
  --cfg job            print the resolved configuration and stop
  --dry-run            print placement, memory per device and traffic, refuse what cannot fit, start nothing
  --device-memory-gib N  with --dry-run: plan for devices of N GiB; devices and vLLM of this machine are not looked at
  --response-tokens N  with --dry-run: mean length of the answers, for the expected bottleneck
  --nodes N,N,...      with --dry-run: devices of each node, the driver's first; print who sits where
  --help               print this text and stop
  --version            print the version and stop

Groups (GROUP=OPTION; keys that the file of --config-name writes down itself win over the group):
{groups}

Most used keys (KEY=VALUE), with the default that holds where the configuration says nothing else:
{keys}
All keys: docs/configuration.md. Keys of an open section are added with a plus: +rollout.engine_args.NAME=VALUE

Examples:
  python -m trainer
  python -m trainer mode.max_staleness=2 run_dir=/tmp/my_run
  python -m trainer --config-name grpo_7b task=math mode.max_staleness=2
  python -m trainer --config-dir my_configs --config-name my_run learner.lr=3e-6
  python -m trainer task.train_path=train.jsonl task.eval_path=test.jsonl task.reward.name=my_reward.py:score
  python -m trainer algorithm.loss=my_package.losses.my_loss      (docs/add_a_loss.md; python -m trainer.check_plugin)

Exit codes:
  0  done
  1  failed; the first cause is the last thing on the screen
  2  the configuration or the data cannot be used; nothing was started
  130  interrupted; saved, if training had begun and it was interrupted once
  141  nobody reads what is shown (--help | head)
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
    limits = bounds_text(info.bounds)
    kind = f"{type_text(info.hint)} {limits}" if limits else type_text(info.hint)
    doc = textwrap.fill(info.doc, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {path}={value_text(info.default)}   ({kind})\n{doc}"
