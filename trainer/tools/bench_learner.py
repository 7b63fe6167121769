"""`python -m trainer bench learner`: steps of the learner alone, without engines, Ray or weights on disk.

Usage: python -m trainer bench learner [--shape SHAPE] [--longest N] [--micro-batch N] [--json FILE] [KEY=VALUE ...]

Every step trains the same packed rows of exactly --micro-batch tokens. Lengths of sequences come from a seeded Pareto
(shape 1, at least --shortest, cut at --longest); the last sequence of a row is cut to what is left. Weights are random.
KEY=VALUE sets keys of `python -m trainer`, such as learner.compile=true; devices, model and data are the benchmark's.

MFU counts the operations that the model asks for, without what is recomputed, as `perf/mfu` does. Peak memory is that
of torch's allocator, from the start of the first step, and "planned" is what `--dry-run` counts for the same things.

Example, one H200 against its data sheet:
  python -m trainer bench learner --shape qwen2.5-1.5b --longest 8192 --micro-batch 32768 --json 1.5b.json
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch.multiprocessing.spawn import spawn

from trainer.config.plain import to_run_config
from trainer.data.batch import MicroBatch
from trainer.driver.memory_plan import Device, gib, learner_items, model_shape, planned_fit, with_tokens
from trainer.errors import ConfigurationError, LearnerError
from trainer.files import write_atomically
from trainer.learner.fit import fit_micro_batch
from trainer.learner.fsdp import open_store
from trainer.learner.model import load_config
from trainer.learner.policy import PolicyTrainer
from trainer.tools.bench_workload import bench_parser, positive
from weight_sync.bench.shapes import architecture
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from trainer.config.schema import RunConfig
    from weight_sync.device.base import Backend


PROMPT_TOKENS = 512
"""Of a sequence, unless that is more than half of the shortest one."""
TIMEOUT_S = 600.0
LAUNCH_GAP_US = 2.0
"""A shorter pause between two kernels is not the host's."""
TOP_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What one rank trains in a step, or the ranks that share its micro-batches."""

    micro_batch_tokens: int
    """0: as many as the learner finds room for."""
    num_micro_batches: int
    shortest: int
    longest: int
    seed: int = 1

    def of_rank(self, rank: int, *, vocab_size: int) -> list[MicroBatch]:
        """Log-probabilities are those of a policy that chooses evenly, and advantages of both signs."""
        rng = np.random.default_rng([self.seed, rank])
        total_loss = 0
        batches: list[MicroBatch] = []
        for _ in range(self.num_micro_batches):
            bounds = [0]
            while bounds[-1] < self.micro_batch_tokens:
                drawn = min(int(self.shortest / (1.0 - rng.random())), self.longest)
                bounds.append(min(bounds[-1] + drawn, self.micro_batch_tokens))
            if bounds[-1] - bounds[-2] < 2 < len(bounds):
                del bounds[-2]  # one token alone has nothing to predict
            mask = np.zeros(self.micro_batch_tokens, np.bool_)
            for start, stop in pairwise(bounds):
                mask[start + min(PROMPT_TOKENS, self.shortest // 2, (stop - start) // 2) : stop] = True
            mask[bounds[:-1]] = False
            total_loss += int(mask.sum())
            batches.append(
                MicroBatch(
                    cu_seqlens=np.array(bounds, np.int32),
                    token_ids=rng.integers(0, vocab_size, self.micro_batch_tokens).astype(np.int32),
                    loss_mask=mask,
                    behavior_logprobs=np.where(mask, -np.log(vocab_size), 0.0).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    advantages=np.where(mask, rng.normal(size=mask.size), 0.0).astype(np.float32),
                    loss_weights=mask.astype(np.float32),
                )
            )
        return [replace(batch, loss_weights=batch.loss_weights / np.float32(total_loss)) for batch in batches]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One benchmark as its ranks get it."""

    shape: str
    rows: Rows
    num_ranks: int
    num_warmup: int
    num_steps: int
    device: str
    is_away_between_steps: bool
    overrides: tuple[str, ...]
    profile: str | None
    """File of rank 0's profile of one more step."""

    def config(self, model_dir: Path) -> RunConfig:
        """Raises ConfigurationError for a key or a value that there is not."""
        data: dict[str, Any] = {}
        for text in self.overrides:
            key, _, value = text.partition("=")
            _set(data, key, yaml.safe_load(value))
        dtype = data.get("model", {}).get("compute_dtype", "float32" if self.device == "cpu" else "bfloat16")
        prompt = min(PROMPT_TOKENS, self.rows.shortest // 2)
        num_sharing = data.get("learner", {}).get("context_parallel_size", 1)
        for key, value in {
            "model.path": str(model_dir),
            "model.random_weights": True,
            "model.compute_dtype": dtype,
            "learner.num_ranks": self.num_ranks,
            "learner.max_tokens_per_micro_batch": -(-self.rows.micro_batch_tokens // num_sharing) or "auto",
            "task.max_prompt_tokens": prompt,
            "rollout.max_response_tokens": self.rows.longest - prompt,
        }.items():
            _set(data, key, value)
        cfg, problems = to_run_config(data)
        if problems:
            raise ConfigurationError(problems)
        return cfg


def _set(data: dict[str, Any], key: str, value: object) -> None:
    *sections, name = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[name] = value


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if a step fails, 2 for a wrong command line."""
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)
    longest = args.longest if args.micro_batch is None else min(args.longest, args.micro_batch)
    shortest = max(2, longest // 16) if args.shortest is None else args.shortest
    if not 2 <= shortest <= longest:
        parser.error(f"--shortest must be 2 to {longest} (--longest, or --micro-batch if that is less), got {shortest}")
    if unknown := [text for text in args.overrides if "=" not in text]:
        parser.error(f"overrides have the form KEY=VALUE, got {unknown[0]!r}")
    job = Job(
        shape=args.shape,
        rows=Rows(
            micro_batch_tokens=0 if args.micro_batch is None else args.micro_batch,
            num_micro_batches=args.micro_batches,
            shortest=shortest,
            longest=longest,
        ),
        num_ranks=args.ranks,
        num_warmup=args.warmup,
        num_steps=args.steps,
        device=get_backend(args.device).name,
        is_away_between_steps=args.away,
        overrides=tuple(args.overrides),
        profile=None if args.profile is None else str(args.profile),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        model_dir = Path(folder)
        config = {**architecture(job.shape).config("float32"), "bos_token_id": None, "eos_token_id": None}
        (model_dir / "config.json").write_text(json.dumps(config))
        try:
            cfg = job.config(model_dir)
        except ConfigurationError as error:
            parser.error(str(error))
        store = open_store("127.0.0.1", cfg.learner.port, is_master=True, world_size=job.num_ranks, timeout_s=TIMEOUT_S)
        if job.num_ranks == 1:
            try:
                _rank_main(0, job, cfg, store.port, folder)
            except LearnerError as error:
                sys.stderr.write(f"{error}\n")
                return 1
        else:
            spawn(_rank_main, args=(job, cfg, store.port, folder), nprocs=job.num_ranks)
        found = json.loads((model_dir / "result.json").read_text())
    sys.stdout.write(table(found))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.json, json.dumps(found, indent=1) + "\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = bench_parser("bench learner", about=__doc__, shape="qwen2.5-1.5b", num_steps=5)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="keys of `python -m trainer`")
    add("--longest", type=positive(int), default=8192, metavar="N", help="of the longest sequence (default: 8192)")
    add("--shortest", type=positive(int), metavar="N", help="default: a sixteenth of --longest; equal: all alike")
    add("--micro-batch", type=positive(int), metavar="N", help="tokens of each packed row (default: as many as fit)")
    add("--micro-batches", type=positive(int), default=4, metavar="N", help="per rank and step (default 4)")
    add("--ranks", type=positive(int), default=1, metavar="N", help="learner processes, one per device (default 1)")
    add("--away", action="store_true", help="weights leave the device between steps, as where engines share it")
    add("--json", type=Path, metavar="FILE", help="figures, settings and versions")
    add("--profile", type=Path, metavar="FILE",
        help="profile one more step: kernels, busy share of the device, what the host waited for; and FILE.json.gz, a "
        "Chrome trace")  # fmt: skip
    return parser


def _rank_main(rank: int, job: Job, cfg: RunConfig, port: int, folder: str) -> None:
    backend = get_backend(job.device, cpu_threads=cfg.device.cpu_threads)
    device = backend.set_device(rank if backend.ray_resource else 0)
    if device.type == "cpu":
        torch.set_num_threads(cfg.device.cpu_threads)
    store = open_store("127.0.0.1", port, is_master=False, world_size=job.num_ranks, timeout_s=TIMEOUT_S)
    dist.init_process_group(
        backend.collective, store=store, rank=rank, world_size=job.num_ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    try:
        found = measure(job, cfg, device=device, backend=backend, rank=rank)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(found))
    except torch.OutOfMemoryError as error:
        given = job.rows.micro_batch_tokens
        _, planned = _planned(cfg, backend, given if given else None)
        lines = "".join(f"\n  {name:<34}{gib(nbytes):>12}" for name, nbytes in planned.items())
        raise LearnerError(f"out of memory on rank {rank} ({error}); planned were{lines}") from error
    finally:
        dist.destroy_process_group()


def measure(job: Job, cfg: RunConfig, *, device: torch.device, backend: Backend, rank: int) -> dict[str, Any]:
    """Figures of rank 0; collective. Its times are those of the others, too: ranks wait for each other."""
    began = time.perf_counter()
    learner = PolicyTrainer(cfg, device=device, backend=backend)
    tokens = fit_micro_batch(learner, cfg, backend, arena_bytes=0, earlier=None).tokens
    num_sharing = cfg.learner.ranks_per_batch
    rows = replace(job.rows, micro_batch_tokens=tokens * cfg.learner.context_parallel_size)
    batches = rows.of_rank(rank // num_sharing, vocab_size=architecture(job.shape).vocab)
    memory = None if device.type == "cpu" else torch.get_device_module(device)
    if memory is not None:
        memory.reset_peak_memory_stats()
    setup_s = time.perf_counter() - began
    results, walls, returns = [], [], list[float]()
    for step in range(job.num_warmup + job.num_steps):
        if job.is_away_between_steps:
            learner.offload.to_host()
            began = time.perf_counter()
            learner.offload.to_device()
            returns.append(time.perf_counter() - began)
        backend.synchronize()
        began = time.perf_counter()
        results.append(learner.train_step(batches, step=step, version=0))
        backend.synchronize()
        walls.append(time.perf_counter() - began)
    counted, wall_s = results[job.num_warmup :], statistics.median(walls[job.num_warmup :])
    peak = None if memory is None else memory.max_memory_allocated()
    reserved = None if memory is None else memory.max_memory_reserved()
    if job.profile is not None:
        _profile(learner, batches, Path(job.profile) if rank == 0 else None, step=len(results))
    num_tokens = sum(len(batch.token_ids) for batch in batches)
    flops, peak_flops = counted[0].model_flops, counted[0].peak_flops
    planned_auto, planned = _planned(cfg, backend, tokens)
    return {
        "job": asdict(job),
        "micro_batch_tokens": tokens,
        "micro_batch_tokens_planned": planned_auto,
        "device": backend.device_name(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "learner": learner.description,
        "setup_s": setup_s,
        "first_step_s": walls[0],
        "step_s": wall_s,
        "steps_s": walls[job.num_warmup :],
        "onload_s": statistics.median(returns[job.num_warmup :]) if returns else None,
        "seconds": {
            phase: statistics.median(result.seconds[phase] for result in counted) for phase in counted[0].seconds
        },
        "tokens_per_step": num_tokens,
        "sequences_per_step": sum(len(batch.cu_seqlens) - 1 for batch in batches),
        "loss_tokens_per_step": sum(int(batch.loss_mask.sum()) for batch in batches),
        "tokens_per_s_per_device": num_tokens / num_sharing / wall_s,
        "model_flops": flops,
        "mfu": None if flops is None or peak_flops is None else flops / num_sharing / peak_flops / wall_s,
        "memory": {
            "peak_bytes": peak,
            "peak_reserved_bytes": reserved,
            "device_bytes": backend.memory_info()[1],
            "planned_bytes": sum(planned.values()),
            "planned": planned,
            "peak_over_planned": None if peak is None else peak / sum(planned.values()),
        },
        "grad_norm": counted[-1].metrics["grad_norm"].mean,
    }


def _planned(cfg: RunConfig, backend: Backend, tokens: int | None) -> tuple[int, dict[str, int]]:
    """Tokens of a micro-batch that `auto` plans, and bytes of everything with `tokens`, or those, without arenas."""
    shape = model_shape(cfg.model, load_config(cfg.model, Path(cfg.model.path)))
    device = Device(backend.name, backend.memory_info()[1], is_shared=backend.ray_resource is None)
    auto = planned_fit(with_tokens(cfg, "auto"), shape, device, None, None).tokens
    plan = learner_items(with_tokens(cfg, auto if tokens is None else tokens), shape, device, None, None)
    return auto, {item.name: item.nbytes for item in plan if not item.name.startswith("arenas")}


def _profile(learner: PolicyTrainer, batches: list[MicroBatch], path: Path | None, *, step: int) -> None:
    """One more step of every rank; writes what is seen at `path`, if there is one."""
    from torch.profiler import profile

    if path is None:
        learner.train_step(batches, step=step, version=0)
        return
    is_on_device = learner.device.type != "cpu"
    with profile() as found:
        learner.train_step(batches, step=step, version=0)
        if is_on_device:
            torch.get_device_module(learner.device).synchronize()
    events = found.events() or []
    kernels = sorted((e.time_range.start, e.time_range.end) for e in events if "CPU" not in str(e.device_type))
    lines = []
    if kernels:
        span, busy, gaps, end = kernels[-1][1] - kernels[0][0], 0.0, list[float](), kernels[0][0]
        for start, stop in kernels:
            if start - end > LAUNCH_GAP_US:
                gaps.append(start - end)
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        largest = ", ".join(f"{gap / 1e3:.2f}" for gap in sorted(gaps, reverse=True)[:10])
        lines = [
            f"{len(kernels)} kernels and copies in {span / 1e3:.1f} ms; the device is busy {busy / span:.1%} of it",
            f"{len(gaps)} gaps over {LAUNCH_GAP_US} us, together {sum(gaps) / 1e3:.1f} ms; largest (ms): {largest}",
        ]
    averages = found.key_averages()
    orders = ["self_cpu_time_total", *(["self_device_time_total"] if is_on_device else [])]
    for order in reversed(orders):
        lines += ["", f"by {order}", averages.table(sort_by=order, row_limit=TOP_ROWS, max_name_column_width=90)]
    waits = ("Synchronize", "aten::item", "aten::_local_scalar_dense", "aten::nonzero", "Memcpy")
    lines += ["", "what may wait (calls, host ms)"]
    lines += [
        f"  {one.key}: {one.count}, {one.self_cpu_time_total / 1e3:.2f}"
        for one in averages
        if any(word in one.key for word in waits)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    found.export_chrome_trace(f"{path}.json.gz")


def table(found: dict[str, Any]) -> str:
    memory, seconds = found["memory"], found["seconds"]
    mfu = "unknown: device.peak_tflops=N" if found["mfu"] is None else f"{found['mfu']:.3f}"
    peak = "not measured" if memory["peak_bytes"] is None else gib(memory["peak_bytes"])
    ratio = "" if memory["peak_over_planned"] is None else f" ({memory['peak_over_planned']:.2f} of it)"
    tokens, planned = found["micro_batch_tokens"], found["micro_batch_tokens_planned"]
    phases = ", ".join(f"{phase} {value:.3f}" for phase, value in seconds.items() if phase != "step")
    away = "" if found["onload_s"] is None else f"; {found['onload_s']:.3f} s to come back before it"
    return (
        f"{found['job']['shape']} on {found['job']['num_ranks']} x {found['device']}: {found['learner']}\n"
        f"  step            {found['step_s']:.3f} s ({phases}); the first {found['first_step_s']:.1f} s{away}\n"
        f"  micro-batches   {tokens:,} tokens; auto, by the plan: {planned:,}\n"
        f"  tokens          {found['tokens_per_step']:,} per rank, {found['tokens_per_s_per_device']:,.0f} /s\n"
        f"  MFU             {mfu}\n"
        f"  peak memory     {peak}; planned {gib(memory['planned_bytes'])}{ratio}\n"
    )
