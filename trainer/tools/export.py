"""Writes a checkpoint of the policy as a Hugging Face model directory.

Usage: python -m trainer export CHECKPOINT OUT [--model PATH] [--config FILE]

CHECKPOINT is run_dir/checkpoints/step_N, or a run directory: its newest checkpoint. OUT is a directory that
does not exist, or is empty. It gets what a run writes to run_dir/export when it finishes: weights in
model.rollout_dtype, the model's config, the tokenizer's files, and of a LoRA run the merged weights and adapter/.

The configuration is read from config.yaml in the run directory of the checkpoint. model.path of the run must still
exist, for the config and the tokenizer, and with LoRA for the weights below the adapters.

Memory: one copy of the model in model.rollout_dtype, with LoRA two.

Exit codes: 0 written, 1 OUT could not be written, 2 refused: the message says what was found and what to do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.builtin.tiny_model import ensure_model, with_model_directory
from trainer.errors import CheckpointError, ModelError, one_line
from trainer.tools.run_records import InvalidRunDir, read_config_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config.schema import RunConfig


EXIT_WRITTEN, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2
CONFIG_FILE = "config.yaml"


class Refused(Exception):
    """What was asked for cannot be done; the message names what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = _parser().parse_args(argv)
    # Seconds of imports, for which --help does not wait.
    from transformers.utils.logging import disable_progress_bar

    from trainer.learner import checkpoint
    from trainer.learner.hf_export import export_checkpoint

    disable_progress_bar()
    try:
        out = _checked_out(args.out)
        path = checkpoint.locate(args.checkpoint)
        state = checkpoint.read_state(path)
        cfg = with_origin(read_config(path, args.config), state.get("origin", {}), model_path=args.model)
        asyncio.run(ensure_model(cfg))
        export_checkpoint(path, out, with_model_directory(cfg))
    except (Refused, CheckpointError, ModelError) as error:
        hint = "; if the model was moved, name its directory with --model PATH" if isinstance(error, ModelError) else ""
        sys.stderr.write(f"refused: {error}{hint}\n")
        return EXIT_REFUSED
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"failed: {args.out} is not written: {one_line(error)}\n")
        return EXIT_FAILED
    sys.stdout.write(f"wrote {out} from {path}, in {cfg.model.rollout_dtype}\n")
    return EXIT_WRITTEN


def read_config(path: Path, given: Path | None) -> RunConfig:
    """Of the run of the checkpoint `path`, or the file `given`. Raises Refused."""
    # run_dir/checkpoints/step_N, or run_dir/checkpoints/abandoned/step_N
    candidates = [parent / CONFIG_FILE for parent in path.parents[1:3]] if given is None else [given]
    file = next((candidate for candidate in candidates if given or candidate.is_file()), None)
    if file is None:
        raise Refused(f"{candidates[0]} does not exist; name the run's {CONFIG_FILE} with --config FILE")
    try:
        config, problems = read_config_file(file)
    except InvalidRunDir as error:
        raise Refused(f"{error}; name another with --config FILE") from error
    # Only the model matters here; other keys may be of another version.
    wrong = [problem for problem in problems if problem.key.partition(".")[0] in {"model", "seed"}]
    if wrong:
        raise Refused(f"{file} cannot be used:\n" + "\n".join(str(problem) for problem in wrong))
    return config


def with_origin(cfg: RunConfig, origin: Mapping[str, Any], *, model_path: str | None) -> RunConfig:
    """The configuration with the run's first model, at `model_path` or the absolute path in the checkpoint, and its
    tokenizer."""
    path = origin.get("model.path", cfg.model.path) if model_path is None else model_path
    tokenizer = origin.get("model.tokenizer_path", cfg.model.tokenizer_path)
    model, seed = replace(cfg.model, path=path, tokenizer_path=tokenizer), origin.get("seed")
    return replace(cfg, seed=cfg.seed if seed is None else seed, model=model)


def _checked_out(given: Path) -> Path:
    """Raises Refused if something would be overwritten."""
    out = given.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise Refused(f"{given} {what}; give a directory that does not exist, or is empty")
    unfinished = out.with_name(f"{out.name}.tmp")
    if unfinished.exists():
        raise Refused(f"{unfinished} exists, where {out.name} is written first; remove it, or choose another OUT")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer export",
        description=(__doc__ or "").partition("\n\nUsage")[0],
        epilog=(__doc__ or "").partition("[--config FILE]\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="checkpoint, or run directory")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    parser.add_argument("--model", metavar="PATH", help="where the model is that the run began with, if it was moved")
    parser.add_argument("--config", metavar="FILE", type=Path, help="config.yaml of the run, if it is elsewhere")
    return parser
