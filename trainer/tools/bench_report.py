"""The table and the plot of a benchmark."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer.telemetry.run_dir import write_atomically
from trainer.telemetry.session import last_line_of
from trainer.tools.bench_figures import strict_ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainer.tools.bench_figures import Figures
    from trainer.tools.bench_workload import Workload


ASK_DEVICE_TIMEOUT_S = 120.0
# In a process of its own: whoever asks a driver holds a part of the device until it ends.
_ASK_DEVICE = """
import os, sys, torch
from weight_sync.device.select import get_backend
backend = get_backend(sys.argv[1])
module = torch.get_device_module(backend.torch_device)
named = getattr(module, "get_device_name", None)
print(f"{backend.num_devices()} x {named(0)}" if named else f"{backend.name}, {os.cpu_count()} cores")
"""


class OtherWorkload(Exception):
    """The file holds results of something else; the message says of what."""


class Results:
    """The results of one workload in one file; every case of it is written as soon as it has ended."""

    def __init__(self, path: Path, work: Workload, *, is_shown_only: bool = False) -> None:
        """
        Args:
            is_shown_only: nothing is added, so figures of the earlier workload, with one length for all answers to a
                prompt, may be in the file.

        Raises:
            OtherWorkload: the file is there and is not one of this workload.
        """
        self._path, described = path, json.loads(json.dumps(asdict(work)))
        self.content: dict[str, Any] = {"workload": described, "runs": {}}
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            before = found["workload"]
        except (ValueError, KeyError, TypeError) as error:
            raise OtherWorkload(f"{path} holds no results ({error!r}); choose another file") from error
        if is_shown_only and isinstance(before, dict) and "lengths_per" not in before:
            described.pop("lengths_per")
        if before != described:
            raise OtherWorkload(f"{path} holds results of workload {before}, not {described}; choose another file")
        self.content = found

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """By the name of the case, in the order in which they were first run."""
        return self.content["runs"]

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """In the place of an older one of the same name."""
        self.runs[name] = dict(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(self.content, indent=1) + "\n")


def figures_as_values(figures: Figures) -> dict[str, Any]:
    """With what follows from them."""
    ratios = {"bound_s": figures.bound_s, "ratio": figures.ratio, "strict_ratio": figures.strict_ratio}
    return {**asdict(figures), **ratios}


def devices(name: str) -> str:
    """What the host has, in words; empty if it does not say."""
    return last_line_of([sys.executable, "-c", _ASK_DEVICE, name], timeout_s=ASK_DEVICE_TIMEOUT_S)


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per case, then what went wrong."""
    header = (
        "case", "devices", "steps", "step s (min-max)", "tok/s/device", "gen bound", "(full)", "learn bound",
        "step/bound", "strict", "wait data", "wait sync", "pause ms", "sync s", "MFU", "start-up",
    )  # fmt: skip
    rows = [header, *(_row(name, run) for name, run in runs.items() if run["figures"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"FAILED {name}: {run['problem']}" for name, run in runs.items() if run["problem"]]
    return "\n".join(lines) + "\n"


def _row(name: str, run: Mapping[str, Any]) -> Sequence[str]:
    f, step = run["figures"], run["figures"]["step_s"]
    started = run["start_up"].get("to_first_step_s")
    strict = strict_ratio(step["mean"], generation_full_s=f["generation_full_s"], learning_s=f["learning_s"])
    return (
        name,
        str(f["num_devices"]),
        f"{f['steps'][0]}-{f['steps'][1]}",
        f"{step['mean']:.2f} ({step['min']:.2f}-{step['max']:.2f})",
        f"{f['tokens_per_s_per_device']:,.0f}",
        f"{f['generation_s']:.2f}",
        "-" if f["generation_full_s"] is None else f"{f['generation_full_s']:.2f}",
        f"{f['learning_s']:.2f}",
        f"{f['ratio']:.2f}",
        "-" if strict is None else f"{strict:.2f}",
        f"{f['learner_waits_for_data_s']:.2f}",
        f"{f['learner_waits_for_sync_s']:.3f}",
        f"{1e3 * f['sync_pause_s']['mean']:.1f}",
        f"{f['sync_end_to_end_s']['mean']:.3f}",
        "-" if f["mfu"] is None else f"{f['mfu']:.3f}",
        "-" if started is None else f"{started:.0f}",
    )


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
