"""Writes docs/configuration.md from the schema."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainer.config.field import Key, keys_of, value_text
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.schema import all_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

_INTRO = """\
# Configuration

<!-- Generated from trainer/config/schema.py by `python scripts/generate_docs.py`; do not edit. -->

`python -m trainer` composes one configuration out of YAML files, groups and overrides, checks all of it, and only then
starts anything:

```
python -m trainer --config-name grpo_7b task=math mode.max_staleness=2 learner.lr=2e-6
```

- `--config-name NAME` picks where to start from: {names} (default `tiny`).
- `GROUP=OPTION` swaps a whole group:

{groups}

  Keys in the file of `--config-name` itself win over a group that is swapped in. `tiny` has no key of `algorithm`, so
  `algorithm=dapo` is DAPO there; `grpo_7b` has `algorithm.kl.coef: 0.04`, and with `algorithm=dapo` it keeps that KL
  term, which DAPO does not have. Start from `dapo_7b` then, and look at `--cfg job`. Likewise `dapo_7b` has
  `mode.max_staleness: 4`, so `mode=sync` also needs `mode.max_staleness=0`.
- `KEY=VALUE` sets one key of the tables below. Text needs no quotes, except inside a list: `rollout.stop='["</a>"]'`.
  No value is `null`, and an empty text is `KEY=`.
- `+rollout.engine_args.NAME=VALUE` and `+device.env.NAME=VALUE` add to open sections, whose type is a map.
- `--config-dir DIR` adds a folder with your own YAML files, laid out like `configs/`; your files come first. Let your
  file begin with `defaults: [tiny, _self_]` and write only what differs.
- `--cfg job` prints the result. The same text is in `config.yaml` in the run directory.

Every problem is reported at once: unknown keys, wrong types, values out of range, combinations that cannot work or
would have no effect, and files, directories and ports that cannot be used. The exit code is then 2, nothing was started
and nothing was written.

A key that would have no effect is refused if the command line or the file of `--config-name` sets it. Where it comes
from another file, or what it belongs to was turned off on the command line, it is reset to its default, and a line
reports it: `--config-name ppo_7b algorithm=grpo` has no critic, and no learning rate for one.

The defaults below are those of the schema, which hold where no YAML file sets another value.
"""


def configuration_markdown() -> str:
    """The whole page."""
    names = ", ".join(f"`{name}`" for name in config_names(packaged_configs()))
    options = groups([packaged_configs()])
    lists = "\n".join(f"  - `{name}`: {', '.join(f'`{word}`' for word in words)}" for name, words in options.items())
    keys = [key for key in all_keys().values() if not key.is_section]
    parts = [_INTRO.format(names=names, groups=lists)]
    parts.append(_table("Top level", "", [key for key in keys if "." not in key.path]))
    for section in (key for key in all_keys().values() if key.is_section):
        inside = [key for key in keys if key.path.rpartition(".")[0] == section.path]
        parts.append(_table(f"`{section.path}`", section.doc, inside))
        for key in inside:
            if key.section_of_entries is not None:
                path = f"{key.path}.NAME"
                parts.append(_table(f"`{path}`", key.doc, keys_of(key.section_of_entries, f"{path}.")))
    return "\n".join(parts)


def _table(title: str, doc: str, keys: Iterable[Key]) -> str:
    rows = [(f"`{key.path}`", key.kind, f"`{value_text(key.default)}`", key.doc) for key in keys]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    head = [f"## {title}", "", *([doc, ""] if doc else [])]
    return "\n".join([*head, "| Key | Type | Default | Meaning |", "|---|---|---|---|", *lines, ""])


if __name__ == "__main__":
    sys.stdout.write(configuration_markdown())
