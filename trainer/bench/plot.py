"""Two panels out of a file of results: step times beside their bounds, and who did what in a steady stretch."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LEARNER, ENGINES, PAUSE = "#f58518", "#4c78a8", "#e45756"


def can_plot() -> bool:
    """Matplotlib is no dependency of Tandem."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draws the runs that have figures. Needs matplotlib.

    Raises:
        ValueError: none has.
    """
    shown = {name: run for name, run in runs.items() if run["figures"]}
    if not shown:
        raise ValueError("no run has figures to draw")
    import matplotlib as mpl  # pyright: ignore[reportMissingImports]

    mpl.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 1.6 + 0.9 * len(shown)), width_ratios=[2, 3], layout="constrained"
    )
    draw_steps(left, shown)
    draw_timelines(right, shown)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


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
        times, heights = steps_of(line["running"])
        most = max(heights, default=0) or 1
        axes.fill_between(times, [place + 0.38] * len(times), [place + 0.38 - 0.4 * h / most for h in heights],
                          step="post", color=ENGINES, lw=0)  # fmt: skip
        axes.vlines([a for a, _ in line["paused"]], place - 0.06, place + 0.4, color=PAUSE, lw=0.8)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set(xlabel="seconds of a steady stretch\nlearner (above), groups with the engines (below), pauses (red)")
    axes.invert_yaxis()


def steps_of(changes: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Times and values of a curve that changes in steps."""
    return [time for time, _ in changes], [value for _, value in changes]
