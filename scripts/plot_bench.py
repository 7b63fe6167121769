"""Draw the results of `python -m trainer bench`: step times beside both bounds, and a timeline of each case.

Usage: python scripts/plot_bench.py FILE.json OUT.png
Needs matplotlib: pip install -e ".[plot]"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.tools.bench import load_results

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEARNER, ENGINES, PAUSE = "#f58518", "#4c78a8", "#e45756"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 drawn, 2 matplotlib or figures are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("out", type=Path, metavar="OUT.png")
    args = parser.parse_args(argv)
    shown = {name: run for name, run in load_results(args.file).items() if run["figures"]}
    if not shown:
        parser.error(f"{args.file} has no case with figures")
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]
    except ImportError:
        parser.error('matplotlib is not installed: pip install -e ".[plot]"')
    mpl.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 1.6 + 0.9 * len(shown)), width_ratios=[2, 3], layout="constrained"
    )
    draw_steps(left, shown)
    draw_timelines(right, shown)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    pyplot.close(figure)
    return 0


def draw_steps(axes: Any, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Bars: mean step time with its range, and both bounds."""
    for place, run in enumerate(runs.values()):
        found = run["figures"]
        step = found["step_s"]
        error = [[step["mean"] - step["min"]], [step["max"] - step["mean"]]]
        first = place == 0
        axes.barh(place - 0.28, step["mean"], 0.26, xerr=error, color="0.45", label="step" if first else None)
        axes.barh(place, found["generation_s"], 0.26, color=ENGINES, label="generation-bound" if first else None)
        axes.barh(place + 0.28, found["learning_s"], 0.26, color=LEARNER, label="learning-bound" if first else None)
        axes.text(step["max"], place - 0.28, f"  {found['ratio']:.2f} x bound", va="center", fontsize=8)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set(xlabel="seconds per step", xlim=(0, 1.35 * max(run["figures"]["step_s"]["max"] for run in runs.values())))
    axes.invert_yaxis()
    axes.legend(loc="lower right", fontsize=8)


def draw_timelines(axes: Any, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Per run: the learner's steps as blocks above, groups with the engines as a curve below, pauses as ticks."""
    for place, run in enumerate(runs.values()):
        line = run["timeline"]
        if not line:
            continue
        axes.broken_barh([(a, b - a) for a, b in line["learner"]], (place - 0.38, 0.3), color=LEARNER)
        times, heights = [time for time, _ in line["running"]], [number for _, number in line["running"]]
        most = max(heights, default=0) or 1
        axes.fill_between(times, [place + 0.38] * len(times), [place + 0.38 - 0.4 * h / most for h in heights],
                          step="post", color=ENGINES, lw=0)  # fmt: skip
        axes.vlines([a for a, _ in line["paused"]], place - 0.06, place + 0.4, color=PAUSE, lw=0.8)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set(xlabel="seconds of a steady stretch\nlearner (above), groups with the engines (below), pauses (red)")
    axes.invert_yaxis()


if __name__ == "__main__":
    sys.exit(main())
