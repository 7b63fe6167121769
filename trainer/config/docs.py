"""Writes docs/configuration.md from the schema."""

from __future__ import annotations

import sys

from trainer.config.field import Key, bounds_text, keys_of, type_text, value_text
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.schema import all_keys

_INTRO = """\
# Configuration

<!-- Generated from trainer/config/schema by `python scripts/generate_docs.py`; do not edit. -->

`python -m trainer` composes one configuration out of YAML files, groups and overrides, checks all of it, and only then
starts anything:

```
python -m trainer --config-name grpo_7b task=math mode.max_staleness=2 learner.lr=2e-6
```

- `--config-name NAME` picks where to start from: {names} (default `tiny`).
- `GROUP=OPTION` swaps a whole group:

{groups}

  What the file of `--config-name` writes down itself wins over a group that is swapped in. `tiny` has no key of
  `algorithm`, so `algorithm=dapo` is DAPO there; `grpo_7b` has `algorithm.kl.coef: 0.04`, and with `algorithm=dapo` it
  keeps that KL term, which DAPO has not. Start from `dapo_7b` then, and look at `--cfg job`. Likewise `dapo_7b` has
  `mode.max_staleness: 4`, so `mode=sync` asks for `mode.max_staleness=0` beside it.
- `KEY=VALUE` sets one key of the tables below. Text needs no quotes of its own, but inside of a
  list: `rollout.stop='["</a>"]'`. A number that may be missing is `null` then, and text is `KEY=`.
- `+rollout.engine_args.NAME=VALUE` and `+device.env.NAME=VALUE` add to open sections, whose type is a map.
- `--config-dir DIR` adds a folder with your own YAML files, laid out like `configs/`; your files come first. Let your
  file begin with `defaults: [tiny, _self_]` and write down only what differs.
- `--cfg job` prints the result. The same text is in `config.yaml` in the run directory.

Every problem is reported at once: unknown keys, wrong types, values out of range, combinations that cannot work or
would do nothing, and files, directories and ports that cannot be used. The exit code is then 2, nothing was started
and nothing was written.

A key that would do nothing is refused if the command line or the file of `--config-name` asks for it. Where it comes
from another file, or what it belongs to was turned off on the command line, it goes back to its default, and a line
says so: `--config-name ppo_7b algorithm=grpo` has no critic, and no learning rate for one.

The defaults below are those of the schema, which hold where no YAML file says otherwise.
"""


def configuration_markdown() -> str:
    """The whole page."""
    options = groups([packaged_configs()])
    parts = [
        _INTRO.format(
            names=", ".join(f"`{name}`" for name in config_names(packaged_configs())),
            groups="\n".join(
                f"  - `{name}`: {', '.join(f'`{v}`' for v in values)}" for name, values in options.items()
            ),
        )
    ]
    infos = all_keys()
    parts.append(_section("Top level", "", [i for i in infos.values() if "." not in i.path and not i.is_section]))
    for section in infos.values():
        if section.is_section:
            inside = [i for i in infos.values() if i.path.rpartition(".")[0] == section.path and not i.is_section]
            parts.append(_section(f"`{section.path}`", section.doc, inside))
            parts += [_entries(info) for info in inside if info.section_of_entries is not None]
    return "\n".join(parts)


def _entries(info: Key) -> str:
    """Of a map of sections, what each of them holds."""
    assert info.section_of_entries is not None
    path = f"{info.path}.NAME"
    return _section(f"`{path}`", info.doc, list(keys_of(info.section_of_entries, f"{path}.")))


def _section(title: str, doc: str, infos: list[Key]) -> str:
    lines = [f"## {title}", ""]
    if doc:
        lines += [doc, ""]
    lines += ["| Key | Type | Default | Meaning |", "|---|---|---|---|", *(_row(info) for info in infos), ""]
    return "\n".join(lines)


def _row(info: Key) -> str:
    limits = bounds_text(info.bounds)
    kind = f"{type_text(info.hint)}, {limits}" if limits else type_text(info.hint)
    cells = [f"`{info.path}`", kind, f"`{value_text(info.default)}`", info.doc]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(configuration_markdown())
