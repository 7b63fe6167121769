"""`python -m trainer bench`: real runs of one workload in several modes, compared from their run directories.

Usage: python -m trainer bench --out FILE.json [--workload w1] [--case MODE:SPLIT ...] [--set WHICH:KEY=VALUE ...]

A case is a mode and its division of the devices: async:2+2 (2 learner devices and 2 for engines), sync:1+3,
colocated:4 (learner and engines on all 4); NAME=MODE:SPLIT gives it another name. FILE.json gets figures of every case
and keeps those of earlier calls. A case that runs out of time fails, but keeps the figures of the steps it made. Run
directories stay in FILE.runs/, console output in FILE.runs/NAME.output.txt.

With --steps N, N steps count. A run makes --warmup steps before them and S (mode.max_staleness of the case) after them,
during which no prompt is left for its engines. "per_step" in FILE.json has every step, and which counted.

Workloads: 7B Qwen2 shape with random bfloat16 weights, prompts of 512 tokens, 32 prompts x 8 responses per step, a
length for each response from a seeded Pareto (shape 1, at least 256) that is cut at 4,096 (w1) or 16,384 (w1-heavy), or
always 256 tokens (uniform). Lengths are forced and the same in every mode. --set WHICH:model.path=DIR takes another
model, with its weights and without MFU, because its shape is unknown here.

Exit codes: 0 every case of this call has figures, 1 one has not, 2 the command line or the file is wrong.

Example, on 4 devices with at most 10 minutes per call (MFU against 989 dense bfloat16 TFLOP/s of a device):
  python -m trainer bench --out w1.json --case async:2+2 --steps 6 --peak-tflops 989 --timeout-s 480
  python -m trainer bench --out w1.json --case sync:2+2 --steps 6 --peak-tflops 989 --timeout-s 480
  python -m trainer bench --out w1.json --show
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from trainer import subprograms
from trainer.files import write_atomically
from trainer.telemetry.session import last_line_of, versions
from trainer.tools.bench_figures import (
    BenchPlan,
    TooShort,
    figures_of,
    per_step,
    start_up,
    strict_ratio,
    timeline_of,
)
from trainer.tools.bench_workload import (
    WORKLOADS,
    Case,
    InvalidCase,
    bench_parser,
    overrides_of,
    parse_case,
    positive,
    run_config,
    with_overrides,
    workload,
    write_inputs,
)
from trainer.tools.run_records import read_records, read_spans

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from trainer.tools.bench_workload import Workload


EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
DEFAULT_CASES = ("async:2+2", "sync:2+2", "colocated:4")
END_S = 60.0
"""Time to stop the actors of a run that was asked to stop now, before it is killed."""
TWO_SIGNALS_S = 1.5
"""A run treats signals that are closer together as one."""
ASK_DEVICE_TIMEOUT_S = 120.0
# In a separate process: one that asks a driver holds a part of the device until it ends.
_ASK_DEVICE = """
import os, sys
from weight_sync.device.select import get_backend
backend = get_backend(sys.argv[1])
name = backend.device_name()
print(f"{backend.num_devices()} x {name}" if name else f"{backend.name}, {os.cpu_count()} cores")
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    if argv[:1] == ["learner"]:
        from trainer.tools.bench_learner import main as bench_learner

        return bench_learner(argv[1:])
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.show:
            sys.stdout.write(table(load_results(args.out)))
            return EXIT_DONE
        work = workload(args.workload, is_tiny=args.tiny, shape=args.shape)
        runs = load_results(args.out, work)
        chosen = [parse_case(text, tensor_parallel_size=args.tp) for text in args.case or DEFAULT_CASES]
        cases = with_overrides(chosen, args.set)
    except (InvalidCase, WorkloadMismatch) as error:
        parser.error(str(error))
    # A scheduler's signal ends the run, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for case in cases:
        _say(f"{case.name}: running, output in {output_of(_run_dir(args, case))}")
        runs[case.name] = result = measure(args, work, case)
        save_results(args.out, work, runs)  # as soon as a case has ended
        _say(f"{case.name}: {result['problem'] or 'done'} after {result['wall_s']:.0f} s")
    sys.stdout.write(table(runs))
    return EXIT_DONE if all(_is_done(runs[case.name]) for case in cases) else EXIT_FAILED


def make_parser() -> argparse.ArgumentParser:
    parser = bench_parser("bench", about=__doc__, shape="qwen2.5-7b", num_steps=8)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.json", help="results; those of earlier calls stay in it")
    add("--workload", choices=sorted(WORKLOADS), default="w1", help="default: w1")
    add("--tiny", action="store_true", help="a scaled-down workload for a CPU: whether it works, not how fast it is")
    add("--case", action="append", metavar="[NAME=]MODE:SPLIT", help=f"default: {' '.join(DEFAULT_CASES)}")
    add("--show", action="store_true", help="run nothing; print what the file has")
    add("--tp", type=positive(int), default=1, metavar="N", help="devices per engine (default 1)")
    add("--set", action="append", default=[], metavar="WHICH:KEY=VALUE",
        help="a key of `python -m trainer` for a mode, a case, or all; e.g. async:mode.max_staleness=2")  # fmt: skip
    add("--timeout-s", type=positive(float), default=1800.0,
        help="deadline of a case (default 1800); its end takes up to a minute more")  # fmt: skip
    add("--peak-tflops", type=positive(float), metavar="T",
        help="what one device can do in bfloat16, for MFU; an H200: 989. Without it there is no MFU")  # fmt: skip
    add("--commit", help="of the code, for the results of a copy without git (default: that of git)")
    return parser


def measure(args: argparse.Namespace, work: Workload, case: Case) -> dict[str, Any]:
    """Run the case, in place of an older run directory. There is a result whatever happens to the run."""
    run_dir = _run_dir(args, case)
    config_dir = run_dir.parent / "inputs"
    config_dir.mkdir(parents=True, exist_ok=True)
    config = run_config(work, *write_inputs(work, config_dir))
    (config_dir / "bench.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    plan = BenchPlan(work=work, case=case, warmup=args.warmup, num_steps=args.steps, peak_tflops=args.peak_tflops)
    overrides = overrides_of(case, work, num_steps=plan.total_steps, device=args.device)
    shutil.rmtree(run_dir, ignore_errors=True)
    code = versions()  # before the run: a checkout may change meanwhile
    arguments = ["--config-dir", str(config_dir), "--config-name", "bench", *overrides, f"run_dir={run_dir}"]
    outcome = run_trainer(arguments, output=output_of(run_dir), timeout_s=args.timeout_s)
    return {
        "case": asdict(case),
        "planned_steps": {"warmup": plan.warmup, "counted": plan.num_steps, "tail": case.max_staleness},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(outcome.started_at)),
        "command": list(outcome.command),
        "wall_s": outcome.wall_s,
        "exit_code": outcome.exit_code,
        "commit": code.get("commit", "") if args.commit is None else args.commit,
        "versions": dict(code),
        "devices": _devices(args.device),  # after the run: before it, nothing may touch the devices
        **examine(run_dir, outcome, plan),
    }


class RunOutcome(NamedTuple):
    command: tuple[str, ...]
    started_at: float
    """Unix time."""
    wall_s: float
    timeout_s: float
    exit_code: int
    timed_out: bool
    output: tuple[str, ...]
    """Lines of the console."""

    @property
    def problem(self) -> str:
        """Why it may lack steps; empty if it ended well."""
        if self.timed_out:
            return f"did not end within {self.timeout_s:g} s"
        last_lines = [line.strip() for line in self.output if line.strip()][-3:]
        return "" if self.exit_code == 0 else f"exit code {self.exit_code}: {' | '.join(last_lines)[-600:]}"


def run_trainer(arguments: Sequence[str], *, output: Path, timeout_s: float) -> RunOutcome:
    """One `python -m trainer`, from beginning to end. Its console output goes to the file `output`."""
    command = subprograms.command("trainer", *arguments)
    started_at = time.time()
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=subprograms.ROOT, env=subprograms.environment(), stdout=file, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            timed_out, wall_s = process.poll() is None, time.time() - started_at
        finally:
            exit_code = _end(process)
    lines = tuple(output.read_text(encoding="utf-8", errors="replace").splitlines())
    return RunOutcome(tuple(command), started_at, wall_s, timeout_s, exit_code, timed_out, lines)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ask the run to end, then kill its process group, which may outlive the driver. Returns the exit code."""
    for _ in range(2):  # the first signal asks for the end after this step, the second for the end now
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TWO_SIGNALS_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


@cache
def _devices(name: str) -> str:
    """Of the host, in words; empty if unknown."""
    return last_line_of([sys.executable, "-c", _ASK_DEVICE, name], timeout_s=ASK_DEVICE_TIMEOUT_S)


def _run_dir(args: argparse.Namespace, case: Case) -> Path:
    return args.out.absolute().with_suffix(".runs") / re.sub(r"[^\w.+-]+", "_", case.name)


def output_of(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.output.txt")


def examine(run_dir: Path, outcome: RunOutcome, plan: BenchPlan) -> dict[str, Any]:
    """Figures, steps, start-up and timeline of a run, as far as it got, and what went wrong."""
    records, spans = read_records(run_dir / "metrics.jsonl"), read_spans(run_dir / "trace.json")
    problems = [outcome.problem]
    found: dict[str, Any] = {"figures": None, "per_step": [], "start_up": {}, "timeline": {}}
    if not records or not spans:
        return {"problem": outcome.problem or f"{run_dir} has no metrics or no trace", **found}
    if not outcome.problem and len(records) < plan.total_steps:
        problems.append(f"made only {len(records)} of its {plan.total_steps} steps")
    found["per_step"] = per_step(records, plan)
    found["start_up"] = start_up(records, spans, outcome.output, started_at=outcome.started_at)
    try:
        found["figures"] = figures_of(records, spans, plan)
        found["timeline"] = timeline_of(records, spans, plan)
    except (TooShort, KeyError) as error:
        problems.append(f"no figures: {error}")
    return {"problem": "; ".join(filter(None, problems)), **found}


class WorkloadMismatch(Exception):
    """The file holds results of something else."""


def load_results(path: Path, work: Workload | None = None) -> dict[str, dict[str, Any]]:
    """Results by the name of their case, in the order of their first runs; none without a file. Raises WorkloadMismatch
    if the file is not one of this workload, or (None) of any."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, runs = content["workload"], content["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadMismatch(f"{path} holds no results ({error!r}); choose another file") from error
    if work is not None and found != (described := json.loads(json.dumps(asdict(work)))):
        raise WorkloadMismatch(f"{path} holds results of workload {found}, not {described}; choose another file")
    return runs


def save_results(path: Path, work: Workload, runs: Mapping[str, Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"workload": asdict(work), "runs": runs}, indent=1) + "\n")


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _strict_ratio(f: Mapping[str, Any]) -> float | None:
    return strict_ratio(f["step_s"]["mean"], generation_full_s=f["generation_full_s"], learning_s=f["learning_s"])


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "devices": lambda f: str(f["num_devices"]),
    "steps": lambda f: f"{f['steps'][0]}-{f['steps'][1]}",
    "step s (min-max)": lambda f: "{mean:.2f} ({min:.2f}-{max:.2f})".format_map(f["step_s"]),
    "tok/s/device": lambda f: f"{f['tokens_per_s_per_device']:,.0f}",
    "gen bound": lambda f: f"{f['generation_s']:.2f}",
    "(full)": lambda f: _known(f["generation_full_s"], ".2f"),
    "learn bound": lambda f: f"{f['learning_s']:.2f}",
    "step/bound": lambda f: f"{f['ratio']:.2f}",
    "strict": lambda f: _known(_strict_ratio(f), ".2f"),
    "wait data": lambda f: f"{f['learner_waits_for_data_s']:.2f}",
    "wait sync": lambda f: f"{f['learner_waits_for_sync_s']:.3f}",
    "pause ms": lambda f: f"{1e3 * f['sync_pause_s']['mean']:.1f}",
    "sync s": lambda f: f"{f['sync_end_to_end_s']['mean']:.3f}",
    "MFU": lambda f: _known(f["mfu"], ".3f"),
}
"""Of the figures."""


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per case, then what went wrong."""
    rows = [("case", *COLUMNS, "start-up")]
    for name, run in runs.items():
        if run["figures"]:
            start_up_s = run["start_up"].get("to_first_step_s")
            rows.append((name, *(text(run["figures"]) for text in COLUMNS.values()), _known(start_up_s, ".0f")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"FAILED {name}: {run['problem']}" for name, run in runs.items() if run["problem"]]
    return "\n".join(lines) + "\n"


def _is_done(run: Mapping[str, Any] | None) -> bool:
    return run is not None and bool(run["figures"]) and not run["problem"]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
