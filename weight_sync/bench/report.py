"""Results for people (a table), for programs (a line of JSON) and for the eye (a picture of one sync)."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from weight_sync.bench.results import Results

ROWS = {
    "publish_s": "learner blocked (publish)",
    "seal_s": "seal, beside training",
    "pull_s": "pull, slowest worker",
    "attest_s": "attest",
    "drain_s": "step under way at a pause",
    "pause_s": "generation paused",
    "commit_s": "commit",
    "end_to_end_s": "end to end (sync)",
    "total_s": "publish + sync",
}
COLORS = {"publish": "tab:orange", "pull": "tab:blue", "attest": "tab:cyan", "commit": "tab:red"}


def table(results: Results) -> str:
    """A few lines that say everything of note."""
    lines = [f"{results.case.label} on {results.device}: {results.transport or 'not opened'}, {results.commit}"]
    lines += [
        f"  {ROWS[name]:<28}{_ms(figure['p50'])} p50 {_ms(figure['max'])} max"
        for name, figure in results.figures().items()
    ]
    lines += [
        f"  worker {name:<21}{_ms(worker['pull_s_p50'])} p50 {worker['gb_s_p50']:8.1f} GB/s "
        f"({worker['bytes'] / 1e9:.3f} GB)"
        for name, worker in results.worker_figures().items()
    ]
    ceiling = results.ceiling()
    if ceiling:
        lines.append(
            f"  {'ceiling (plain copies)':<28}{_ms(ceiling['s_p50'])} p50 {_ms(ceiling['s_best'])} best, "
            f"{ceiling['gb_s_best']:.1f} GB/s; pulls reach {ceiling['ratio']:.3f} of it"
        )
    lines += [
        f"  {name:<28}{_ms(baseline['seconds']['p50'])} p50 {_ms(baseline['seconds']['max'])} max, "
        f"{'bit-exact' if baseline['bit_exact'] else 'DIFFERS'}"
        for name, baseline in results.as_json()["baselines"].items()
    ]
    if results.baselines_skipped:
        lines.append(f"  no baselines: {results.baselines_skipped}")
    lines += [
        f"  {name.removesuffix('_s'):<28}{_generation(name, value)}" for name, value in results.generation.items()
    ]
    if results.samples:
        growth = max(results.memory_growth().values(), default=0)
        retries = sum(sample.report.num_retries for sample in results.samples)
        lines.append(
            f"  {len(results.samples)} syncs, {retries} retries, {len(results.mismatches)} mismatches, memory grew by "
            f"{growth / 2**20:.1f} MiB, counters grew: {results.grown_counters() or 'none'}"
        )
    lines.append(f"  start {results.start_s:.1f} s, open {results.open_s:.2f} s, whole case {results.total_s:.1f} s")
    lines += [f"  FAILED: {problem}" for problem in results.problems()]
    return "\n".join(lines) + "\n"


def append_json(results: Results, path: Path) -> None:
    """One line per case, written as soon as the case is done."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(results.as_json()) + "\n")


def plot(results: Results, path: Path) -> str:
    """Draw the timeline of the median sync. Returns what was done, or why not."""
    rows: list[dict[str, Any]] = results.as_json()["timeline"]
    if not rows:
        return "no picture: no sync succeeded"
    try:
        matplotlib: Any = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = import_module("matplotlib.pyplot")
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib); the timeline is in the JSON"
    parties = sorted({row["party"] for row in rows}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.35 * len(parties)))
    for row in rows:
        width = 1000 * (row["stop_s"] - row["start_s"])
        color = COLORS[row["phase"]]
        axes.barh(parties.index(row["party"]), width, left=1000 * row["start_s"], color=color, height=0.6)
    axes.set_yticks(range(len(parties)), parties)
    axes.set_xlabel("milliseconds since publish began")
    axes.set_title(f"{results.case.label}: one sync, {results.transport}")
    axes.legend(handles=[pyplot.Rectangle((0, 0), 1, 1, color=c, label=name) for name, c in COLORS.items()])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"picture: {path}"


def _generation(name: str, value: float) -> str:
    if name.endswith("tokens_s"):
        return f"{value:9.0f} per s"
    return _ms(value) if name.endswith("_s") else f"{value:9d}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:9.2f} ms"
