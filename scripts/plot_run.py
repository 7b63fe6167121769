"""Draw one run as a picture: what it learned, and who did what when.

Usage: python scripts/plot_run.py RUN_DIR OUT.png [--window SECONDS]
Reads metrics.jsonl and, if there is one, trace.json, also during the run; of a run that was resumed the timeline
is of the last start. Needs matplotlib: pip install -e ".[plot]"
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.tools.run_records import Span, read_records, read_spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TRACKS = {"groups": "#4c78a8", "learner": "#f58518", "sync": "#54a24b", "engine": "#e45756", "evaluation": "#b279a2"}


def main(argv: Sequence[str] | None = None) -> int:
    """Two panels: curves over steps above, the timeline of a few seconds from the middle of the training below. Returns
    the exit code: 0 drawn, 2 matplotlib or the steps of a run are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of the timeline to show (default 4)")
    args = parser.parse_args(argv)
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return refused('matplotlib is not installed; install it with: pip install -e ".[plot]"')
    metrics = args.run_dir / "metrics.jsonl"
    if not metrics.is_file():
        return refused(f"{metrics} does not exist; give a run directory in which a step has ended")
    if not (records := read_records(metrics)):
        return refused(f"{metrics} has no whole line; wait until a step has ended")

    mpl.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 6.5), height_ratios=[3, 2], layout="constrained")
    draw_curves(above, records)
    draw_timeline(below, spans_of_last_start(args.run_dir / "trace.json"), window_s=args.window)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    return 0


def refused(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return 2


def draw_curves(axes: Any, records: list[dict[str, Any]]) -> None:
    """Reward of training responses and held-out accuracy against steps; trained age on the right."""
    rewards = [r.get("reward/mean") for r in records]
    axes.plot([r["step"] for r in records], numbers(rewards), color="#9ecae9", label="reward")
    scored = [r for r in records if "eval/accuracy" in r]
    axes.plot(
        [r["eval/version"] for r in scored], numbers(r["eval/accuracy"] for r in scored), "o-", color="#4c78a8",
        label="held-out accuracy (greedy)",
    )  # fmt: skip
    axes.set(xlabel="optimizer step", title="What it learned")
    axes.set_ylim(*reward_limits([*rewards, *(r["eval/accuracy"] for r in scored)]))
    ages = axes.twinx()
    oldest = [r["staleness/max"] for r in records]
    ages.plot([r["step"] for r in records], oldest, ":", color="#e45756", label="max age")
    ages.set(ylabel="age of trained tokens (versions)", ylim=(0, max(2, *oldest) * 1.5))
    handles = [line for side in (axes, ages) for line in side.get_lines()]
    axes.legend(handles, [line.get_label() for line in handles], loc="lower right")


def numbers(values: Iterable[float | None]) -> list[float]:
    """A gap in the curve for what is not known."""
    return [math.nan if value is None else value for value in values]


def reward_limits(values: Iterable[float | None]) -> tuple[float, float]:
    """From 0 to 1, and further where a reward is: some are negative, or sums of parts."""
    known = [value for value in values if value is not None]
    return min([0.0, *known]), max([1.0, *known])


def spans_of_last_start(path: Path) -> list[Span]:
    """Of the last process of the run, in order of their begin; none with `telemetry.trace=false`."""
    spans = read_spans(path)
    last = max((span.process for span in spans), default=0)
    return sorted((span for span in spans if span.process == last), key=lambda span: span.begin_s)


def draw_timeline(axes: Any, spans: list[Span], *, window_s: float) -> None:
    """Spans of every track over a window from the middle of the training; overlapping ones in rows of their own."""
    if not spans:
        return
    steps = [span for span in spans if span.track == "learner"] or spans  # a start may take longer than all steps
    middle = (steps[0].begin_s + steps[-1].end_s) / 2
    shown = [
        (span.track, max(span.begin_s - middle, 0.0), min(span.end_s - middle, window_s))
        for span in spans
        if span.end_s > middle
    ]
    shown = [span for span in shown if span[1] < window_s]
    base, ticks = 0, []
    for track, color in TRACKS.items():
        rows: list[float] = []
        # "engine": one track per engine, "engine replica_0", drawn as one.
        for _, begin, end in (span for span in shown if span[0].split(" ")[0] == track):
            row = next((i for i, free_at in enumerate(rows) if free_at <= begin), len(rows))
            rows[row:row + 1] = [end]  # fmt: skip
            axes.barh(base + row, max(end - begin, 0.003), left=begin, height=0.9, color=color)
        if rows:
            ticks.append((base + (len(rows) - 1) / 2, f"{track} ({len(rows)} at once)" if len(rows) > 1 else track))
            base += len(rows) + max(2, base // 20)
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, window_s), title=f"Who did what, for {window_s:g} s from the middle of the run")


if __name__ == "__main__":
    sys.exit(main())
