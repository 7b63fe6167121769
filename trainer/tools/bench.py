"""`python -m trainer.bench`: real runs of one workload in several modes, compared from their run directories.

Usage: python -m trainer.bench --out FILE.json [--workload w1] [--case MODE:SPLIT ...] [--set WHICH:KEY=VALUE ...]

A case is a mode and its division of the devices: async:2+2 (2 learner devices beside 2 for engines), sync:1+3,
colocated:4 (learner and engines on all 4). NAME=MODE:SPLIT gives it a name of its own, so that one mode can be tried
with several settings. Every case ends with figures in FILE.json, where those of earlier calls stay: several short calls
do what one long one does. A case that runs out of time has failed, but keeps the figures of the steps it got to. The
run directories stay in FILE.runs/, and what a run wrote to the screen in FILE.runs/NAME.output.txt.

With --steps N, N steps count. Every run makes --warmup steps before them and S (mode.max_staleness of the case) behind
them: no prompt is left for its engines while it trains its last S. "per_step" in FILE.json has every step of every run,
and says which counted.

Workloads: 7B Qwen2 shape with random bfloat16 weights, prompts of 512 tokens, 32 prompts x 8 answers per step, a length
for each answer from a seeded Pareto (shape 1, at least 256) that is cut at 4,096 (w1) or 16,384 (w1-heavy); uniform has
256 tokens in every answer, where there is least to win. Lengths are forced and the same in every mode. Another model,
with its weights, is --set WHICH:model.path=DIR; its shape is not known here, so its runs have no MFU.

Exit codes: 0 every case of this call has figures, 1 one has not, 2 the command line or the file is wrong.

Example, on 4 devices with at most 10 minutes per call (MFU against 989 dense bfloat16 TFLOP/s of a device):
  python -m trainer.bench --out w1.json --case async:2+2 --steps 6 --peak-tflops 989 --timeout-s 480
  python -m trainer.bench --out w1.json --case sync:2+2 --steps 6 --peak-tflops 989 --timeout-s 480
  python -m trainer.bench --out w1.json --show --plot w1.png
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainer.telemetry.session import versions
from trainer.tools.bench_figures import Measure, TooShort, figures_of, per_step, start_up, timeline_of
from trainer.tools.bench_report import OtherWorkload, Results, can_plot, devices, figures_as_values, plot, table
from trainer.tools.bench_workload import (
    WORKLOADS,
    BadCase,
    Case,
    overrides_of,
    parse_case,
    run_config,
    with_overrides,
    workload,
    write_inputs,
)
from trainer.tools.run_records import spans_of
from weight_sync.bench.shapes import MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType


ROOT = Path(__file__).resolve().parents[2]
END_S = 60.0
"""A run that is told to stop at once may take so long to stop its actors; then it is killed."""
TWO_SIGNALS_S = 1.5
"""A run takes signals that come closer together for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    command: tuple[str, ...]
    started_at: float
    """Unix time."""
    wall_s: float
    timeout_s: float
    """Its limit."""
    exit_code: int
    timed_out: bool
    last_words: str
    """The last lines that it wrote to the screen."""

    @property
    def problem(self) -> str:
        """Why it cannot be trusted to have done all its steps; empty if it can."""
        if self.timed_out:
            return f"did not end within {self.timeout_s:g} s"
        return "" if self.exit_code == 0 else f"exit code {self.exit_code}: {self.last_words}"


def run_case(config_dir: Path, run_dir: Path, overrides: Sequence[str], *, timeout_s: float) -> Ended:
    """One `python -m trainer`, from beginning to end. An older `run_dir` is removed; its output is beside it."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    chosen = ["--config-dir", str(config_dir), "--config-name", "bench", *overrides, f"run_dir={run_dir}"]
    command = [sys.executable, "-m", "trainer", *chosen]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    output = output_of(run_dir)
    started_at = time.time()
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            timed_out = False
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            timed_out = process.poll() is None
            wall_s = time.time() - started_at
        finally:
            code = _end(process)
    return Ended(
        command=tuple(command),
        started_at=started_at,
        wall_s=wall_s,
        timeout_s=timeout_s,
        exit_code=code,
        timed_out=timed_out,
        last_words=_last_words(output),
    )


def output_of(run_dir: Path) -> Path:
    """What the run wrote to the screen."""
    return run_dir.with_name(f"{run_dir.name}.output.txt")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ends the run, first in order, then by force with its whole process group. Returns the exit code."""
    for _ in range(2):  # the first signal asks for the end after this step, the second for the end now
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TWO_SIGNALS_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    # Also when the driver has ended: its group may have outlived it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _last_words(output: Path) -> str:
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-3:])[-600:]


EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
DEFAULT_CASES = ("async:2+2", "sync:2+2", "colocated:4")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.plot is not None and not can_plot():
        parser.error("--plot needs matplotlib, which is no dependency of Tandem: pip install matplotlib")
    work = workload(args.workload, is_tiny=args.tiny, shape=args.shape)
    try:
        results = Results(args.out, work, is_shown_only=args.show)
        chosen = [parse_case(text, tensor_parallel_size=args.tp) for text in args.case or DEFAULT_CASES]
        cases = [] if args.show else _only(with_overrides(chosen, args.set), args.only)
    except (BadCase, OtherWorkload) as error:
        parser.error(str(error))
    if args.skip_done:
        cases = [case for case in cases if not _is_done(results, case)]
    signal.signal(signal.SIGTERM, _stop)  # so that a scheduler's end is an orderly one, which ends the run too
    bench = _Bench(args, results)
    for case in cases:
        bench.measure(case)
    sys.stdout.write(table(results.runs))
    if args.plot is not None:
        plot(results.runs, args.plot)
    return EXIT_DONE if all(_is_done(results, case) for case in cases) else EXIT_FAILED


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.json", help="results; those of earlier calls stay in it")
    add("--workload", choices=sorted(WORKLOADS), default="w1", help="default: w1")
    add("--shape", choices=sorted(MODELS), default="qwen2.5-7b",
        help="model of the workload; one learner device holds 3B, not 7B (default qwen2.5-7b)")  # fmt: skip
    add("--tiny", action="store_true", help="a scaled-down workload for a CPU: whether it works, not how fast it is")
    add("--case", action="append", metavar="[NAME=]MODE:SPLIT", help=f"default: {' '.join(DEFAULT_CASES)}")
    add("--only", action="append", default=[], metavar="WHICH", help="of the cases, run this mode or name alone")
    add("--skip-done", action="store_true", help="leave out cases of which the file has figures")
    add("--show", action="store_true", help="run nothing; print (and draw) what the file has")
    add("--tp", type=_positive(int), default=1, metavar="N", help="devices per engine (default 1)")
    add("--set", action="append", default=[], metavar="WHICH:KEY=VALUE",
        help="a key of `python -m trainer` for a mode, a case, or all; e.g. async:mode.max_staleness=2")  # fmt: skip
    add("--steps", type=_positive(int), default=8, metavar="N",
        help="optimizer steps per case that count (default 8); a run makes --warmup + N + S")  # fmt: skip
    add("--warmup", type=_positive(int), default=2, metavar="N",
        help="first steps that do not count (default 2; S > 1 needs more, until its slots are open)")  # fmt: skip
    add("--timeout-s", type=_positive(float), default=1800.0,
        help="deadline of a case (default 1800); its end takes up to a minute more")  # fmt: skip
    add("--device", default="auto", help="device of the runs, as in `python -m trainer` (default auto)")
    add("--peak-tflops", type=_positive(float), metavar="T",
        help="what one device can do in bfloat16, for MFU; an H200: 989. Without it there is no MFU")  # fmt: skip
    add("--commit", help="of the code, for the results of a copy without git (default: what git says)")
    add("--plot", type=Path, metavar="FILE.png", help="draw step times and timelines; needs matplotlib")
    return parser


class _Bench:
    """Measures cases one after the other."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self._args, self._results = args, results
        self._folder: Path = args.out.absolute().with_suffix(".runs")
        self._work = workload(args.workload, is_tiny=args.tiny, shape=args.shape)
        self._devices: str | None = None

    def measure(self, case: Case) -> None:
        """Run it; whatever happens to the run, its result is written."""
        args, config_dir = self._args, self._folder / "inputs"
        config_dir.mkdir(parents=True, exist_ok=True)
        config = run_config(self._work, *write_inputs(self._work, config_dir), device=args.device)
        (config_dir / "bench.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        run_dir = self._folder / re.sub(r"[^\w.+-]+", "_", case.name)
        how = Measure(
            work=self._work, case=case, warmup=args.warmup, num_steps=args.steps, peak_tflops=args.peak_tflops
        )
        overrides = overrides_of(case, self._work, num_steps=how.total_steps, device=args.device)
        _say(f"{case.name}: running, output in {output_of(run_dir)}")
        code = versions()  # before the run: a checkout may change meanwhile
        ended = run_case(config_dir, run_dir, overrides, timeout_s=args.timeout_s)
        result = {**self._about(how, ended, code), **examine(run_dir, ended, how)}
        self._results.add(case.name, result)
        _say(f"{case.name}: {result['problem'] or 'done'} after {ended.wall_s:.0f} s")

    def _about(self, how: Measure, ended: Ended, code: Mapping[str, str]) -> dict[str, Any]:
        if self._devices is None:  # after the first run: before it, nobody is to touch the devices
            self._devices = devices(self._args.device)
        given = self._args.commit
        return {
            "case": asdict(how.case),
            "planned_steps": {"warmup": how.warmup, "counted": how.num_steps, "tail": how.case.max_staleness},
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ended.started_at)),
            "command": list(ended.command),
            "wall_s": ended.wall_s,
            "exit_code": ended.exit_code,
            "commit": code.get("commit", "") if given is None else given,
            "versions": dict(code),
            "devices": self._devices,
        }


def examine(run_dir: Path, ended: Ended, how: Measure) -> dict[str, Any]:
    """Figures, steps, start-up and timeline of a run, or as much of them as it got to, and what went wrong."""
    found: dict[str, Any] = {"problem": ended.problem, "figures": None, "per_step": [], "start_up": {}, "timeline": {}}
    metrics, trace = run_dir / "metrics.jsonl", run_dir / "trace.json"
    if not metrics.is_file() or not trace.is_file():
        found["problem"] = found["problem"] or f"{run_dir} has no metrics or no trace"
        return found
    # A run that was killed may leave half a line.
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    spans = list(spans_of(trace.read_text(encoding="utf-8", errors="replace").splitlines()))
    output = output_of(run_dir).read_text(encoding="utf-8", errors="replace").splitlines()
    if not ended.problem and len(records) < how.total_steps:
        found["problem"] = f"made only {len(records)} of its {how.total_steps} steps"
    found["per_step"] = per_step(records, how)
    found["start_up"] = start_up(records, spans, output, started_at=ended.started_at)
    try:
        found["figures"] = figures_as_values(figures_of(records, spans, how))
        found["timeline"] = timeline_of(records, spans, how)
    except (TooShort, KeyError) as error:
        found["problem"] = "; ".join(text for text in (found["problem"], f"no figures: {error}") if text)
    return found


def _only(cases: Sequence[Case], which: Sequence[str]) -> list[Case]:
    """Raises BadCase if a word reaches no case."""
    for word in which:
        if not any(word in (case.mode, case.name) for case in cases):
            raise BadCase(f"--only {word}: no such case; there are {', '.join(case.name for case in cases)}")
    return [case for case in cases if not which or {case.mode, case.name} & set(which)]


def _is_done(results: Results, case: Case) -> bool:
    run = results.runs.get(case.name)
    return run is not None and bool(run["figures"]) and not run["problem"]


def _positive(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _stop(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
