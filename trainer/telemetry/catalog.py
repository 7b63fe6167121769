"""Looks metrics up in their rows, checks records against them, and writes docs/metrics.md."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from trainer.telemetry.metric_rows import METRICS, SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainer.telemetry.metric_rows import MetricInfo


REQUIRED: tuple[str, ...] = (
    "step", "version", "time_s", "reward/mean", "staleness/max", "staleness/mean", "discarded_tokens",
    "perf/rollout_tokens_per_s", "perf/train_tokens_per_s", "wait/learner_for_data_s", "wait/learner_for_sync_s",
    "wait/engines_idle_s", "wait/producer_for_slots_s",
    "sync/pack_s", "sync/pull_s", "sync/pause_s", "sync/version_lag",
)  # fmt: skip
"""On every line. `eval/accuracy` and `eval/version` stand on the lines where an evaluation ended."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def find_row(name: str) -> MetricInfo | None:
    """The row of a metric, or None if the catalog does not know it. `eval/NAME/...` of a set has that of `eval/...`."""
    found = _BY_NAME.get(name) or _BY_NAME.get(f"{name.rpartition('/')[0]}/*")
    of_set = name.split("/", 2)
    return find_row(f"eval/{of_set[2]}") if found is None and of_set[0] == "eval" and len(of_set) == 3 else found


def check_known(record: Mapping[str, object] | Iterable[str]) -> None:
    """Raises `ValueError` if `record` holds a metric that the catalog does not know."""
    unknown = sorted(name for name in record if find_row(name) is None)
    if unknown:
        close = {name: difflib.get_close_matches(name, _BY_NAME, n=1) for name in unknown}
        listed = ", ".join(f"{name} (close: {close[name][0]})" if close[name] else name for name in unknown)
        raise ValueError(f"metrics without a row in trainer/telemetry/metric_rows: {listed}; add one or use it")


def check_complete(record: Mapping[str, object]) -> None:
    """Raises `ValueError` if a step's record lacks a metric that every line must have."""
    missing = [name for name in REQUIRED if name not in record]
    if "eval/accuracy" in record and "eval/version" not in record:
        missing.append("eval/version")
    if missing:
        raise ValueError(f"the record of step {record.get('step')} lacks {', '.join(missing)}")


_INTRO = """\
# Metrics

<!-- Generated from trainer/telemetry/metric_rows by `python scripts/generate_docs.py`; do not edit. -->

`metrics.jsonl` in the run directory holds one JSON object per line and optimizer step; the same numbers go to
TensorBoard (`tensorboard --logdir RUN_DIR/tb`), and with `telemetry.wandb` to
[Weights & Biases](quickstart.md#weights--biases).

- A metric without data in a step is absent from its line. `null` means that a NaN or an infinity was computed; the
  first time, log.txt says which.
- Means are over all ranks and micro-batches of the step, weighted by what they count, and are divided once. In a step
  without a trained token, means of tokens in `learner/` and `staleness/` are 0.
- Times in `learner/` are of the slowest rank, each for itself: together they can be more than `learner/step_s`.
- `sync/` is about the newest version that was live when the step ended, usually the one before the step's own; several
  short steps may show the same one.
- A run that is resumed appends. Lines of steps after the checkpoint are cut first, because those steps run again.
- A line is on disk as soon as it is written. A crash can at most leave one incomplete line at the end, which the next
  process cuts.
- `perf/mfu` counts the policy's forward and backward (6 operations per weight and token, 4 where it is frozen, logits
  of trained tokens only, causal attention; nothing that is recomputed) over `learner/step_s` (optimizer, reference and
  critic included), all learner devices and `device.peak_tflops`. Absent where one is not known, as on a CPU.
- `eval/NAME/...` is the metric `eval/...` of the set `task.eval_sets.NAME`; `eval/...` itself is of `task.eval_path`.
- S is `mode.max_staleness`. A name that ends in `/*` stands for a family.

"""


def metrics_markdown() -> str:
    """The page docs/metrics.md."""
    required = ", ".join(f"`{name}`" for name in REQUIRED)
    tables = "\n".join(_table(title, rows) for title, rows in SECTIONS.items())
    return f"{_INTRO}On every line: {required}. Where an evaluation ended: `eval/accuracy`, `eval/version`.\n\n{tables}"


def _table(title: str, rows: Sequence[MetricInfo]) -> str:
    lines = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.healthy} |" for m in rows]
    return "\n".join([f"## {title}", "", "| Name | Unit | Meaning | Healthy |", "|---|---|---|---|", *lines, ""])
