"""Problems with the files, directories, packages and ports of a configuration that show without torch or network.

`python -m trainer` reports them together with those of the configuration itself.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainer.config.rules import REFUSED_ENGINE_ARGS, longest_sequence
from trainer.config.schema import model_paths, problem
from trainer.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.config.schema import RunConfig


_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".arrow")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt",
)  # fmt: skip
_MODEL_CONFIG = "config.json"


def file_problems(config: RunConfig) -> list[Problem]:
    """Every file, directory, package or port that the run needs and cannot have."""
    checks = (_run_dir, _models, _data, _plugins, _engine_args, _resume, _packages, _port)
    return [problem for check in checks for problem in check(config)]


def looks_local(name: str) -> bool:
    """Whether `name` can only be a path; a hub name is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _run_dir(config: RunConfig) -> Iterator[Problem]:
    wanted = Path(config.run_dir or "runs")
    if config.run_dir and wanted.exists() and not wanted.is_dir():
        yield problem(config, "run_dir", "is a file", "name a directory, new or of an earlier run")
        return
    existing = next(parent for parent in [wanted, *wanted.absolute().parents] if parent.exists())
    try:
        # Asking the file system is the only way to know: permissions do not show read-only mounts.
        Path(tempfile.mkdtemp(prefix=".tandem-", dir=existing)).rmdir()
    except OSError as error:
        message, hint = f"cannot be written: {existing}: {error.strerror}", "choose another directory with run_dir=PATH"
        yield Problem(key="run_dir", value=str(wanted), message=message, hint=hint)


# --- models ---


def _models(config: RunConfig) -> Iterator[Problem]:
    """Critic and teacher count only if used, and have the policy's tokenizer."""
    algorithm, tokenizer = config.algorithm, config.model.tokenizer_path
    is_used = {"critic.path": algorithm.uses_critic, "algorithm.kl.reference_model": algorithm.kl.coef > 0}
    for key, path in model_paths(config).items():
        if not is_used.get(key, True) or path == "builtin:tiny":
            continue
        if path.startswith("builtin:"):
            yield problem(config, key, "the only built-in model is builtin:tiny")
        elif not path:
            yield problem(config, key, "must name a model", "use builtin:tiny or a directory")
        elif looks_local(path):
            yield from _model_directory(config, key, Path(path))
    if tokenizer and (tokenizer.startswith("builtin:") or looks_local(tokenizer)):
        yield from _tokenizer_directory(config, "model.tokenizer_path", Path(tokenizer))


def _model_directory(config: RunConfig, key: str, directory: Path) -> Iterator[Problem]:
    file, is_policy = directory / _MODEL_CONFIG, key == "model.path"
    if not file.is_file():
        exists = "is not a directory" if directory.exists() else "does not exist"
        message = f"has no {_MODEL_CONFIG}" if directory.is_dir() else exists
        hint = "give the directory of a Hugging Face model, a hub name (owner/name) or builtin:tiny"
        yield problem(config, key, message, hint)
        return
    if is_policy and not config.model.tokenizer_path:
        yield from _tokenizer_directory(config, key, directory)
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield problem(config, key, f"its {_MODEL_CONFIG} cannot be read: {error}", "download the model again")
        return
    if isinstance(described, dict):
        nested = cast("dict[str, Any]", described).get("text_config")
        yield from fit_problems(config, nested if isinstance(nested, dict) else described, key=key)  # pyright: ignore


def _tokenizer_directory(config: RunConfig, key: str, path: Path) -> Iterator[Problem]:
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        message = f"has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})" if path.is_dir() else "does not exist"
        yield problem(config, key, message, "set model.tokenizer_path to a tokenizer", "model.path")


def fit_problems(config: RunConfig, text: Mapping[str, Any], *, key: str) -> Iterator[Problem]:
    """What engine or learner would refuse only after the start: heads that cannot be split, and a context that is too
    short. `text` is the config of the text model that `key` names; engines have only the policy."""
    path = model_paths(config)[key]
    undivided = "learner.tensor_parallel_size"
    parts = {"learner.context_parallel_size": config.learner.context_parallel_size}
    parts[undivided] = config.learner.tensor_parallel_size
    if key == "model.path":
        parts["rollout.tensor_parallel_size"] = config.rollout.tensor_parallel_size
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    for parallel_key, num_parts in parts.items():
        message = ""
        if isinstance(heads, int) and heads % num_parts:
            message = f"must divide the {heads} attention heads of {path}"
        # Every part has equally many heads; one of keys and values may be in several, unless its matrix is divided.
        elif isinstance(kv_heads, int) and kv_heads > 0 and kv_heads % num_parts:
            if parallel_key == undivided:
                message = f"must divide the {kv_heads} key-value heads of {path}"
            elif num_parts % kv_heads:
                message = f"must divide the {kv_heads} key-value heads of {path}, or be a multiple of them"
        if message:
            yield problem(config, parallel_key, message, "", key)
    context = text.get("max_position_embeddings")
    is_stretched = any(_stretches_context(text.get(name)) for name in ("rope_scaling", "rope_parameters"))
    longest = max(longest_sequence(config), config.rollout.max_model_len)
    if isinstance(context, int) and longest > context and not is_stretched:
        message = f"prompt and response need {longest} tokens, but the context of {path} has {context}"
        hint = "lower rollout.max_response_tokens, task.max_prompt_tokens or rollout.max_model_len"
        related = ("task.max_prompt_tokens", "rollout.max_model_len", key)
        yield problem(config, "rollout.max_response_tokens", message, hint, *related)


def _stretches_context(rope: Any) -> bool:
    """Transformers 5 writes `rope_parameters` for models without scaling too."""
    return isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default"  # pyright: ignore


# --- data, plug-ins, checkpoints ---


def _data(config: RunConfig) -> Iterator[Problem]:
    task = config.task
    for key, name in {"task.train_path": task.train_path, **task.held_out_paths}.items():
        is_file = name.endswith(_DATA_SUFFIXES) or task.reader in {"jsonl", "parquet"}
        if not name or name == "builtin:arithmetic":
            continue
        if name.startswith("builtin:"):
            yield Problem(key=key, value=name, message="the only built-in task is builtin:arithmetic")
        elif (is_file or looks_local(name)) and not Path(name).exists():
            hint = "give a file, a directory, a hub name (owner/name) or builtin:arithmetic"
            yield Problem(key=key, value=name, message="does not exist", hint=hint, related=("task.reader",))


def _plugins(config: RunConfig) -> Iterator[Problem]:
    for key, value in {"task.reward.name": config.task.reward.name, "task.agent": config.task.agent}.items():
        file, colon, name = value.rpartition(":")
        if not colon or not file.endswith(".py"):
            continue
        if not Path(file).expanduser().is_file():
            yield problem(config, key, f"the file {file} does not exist", "give path/to/file.py:function")
        elif not name.isidentifier():
            yield problem(config, key, f"{name!r} is not the name of a function")


def _resume(config: RunConfig) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    if resume not in {"auto", "never"} and (not resume or not Path(resume).is_dir()):
        hint = "use auto, never, or the directory of a checkpoint (run_dir/checkpoints/step_N)"
        yield problem(config, "checkpoint.resume", "is not a directory", hint)


# --- packages and ports ---


def _engine_args(config: RunConfig) -> Iterator[Problem]:
    known = _fields_of_engine_args() if config.rollout.engine_args else None
    if known is None:
        return
    for name, value in config.rollout.engine_args.items():
        if name not in known and name not in REFUSED_ENGINE_ARGS:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see the arguments of vllm.AsyncEngineArgs"
            message = f"must hold arguments of vLLM's engine, which has no {name}"
            yield Problem(key="rollout.engine_args", value=f"{name}: {value}", message=message, hint=hint)


def _fields_of_engine_args() -> set[str] | None:
    """Read from vLLM's source, whose import takes many seconds; None without vLLM, or if the source looks different."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return None
    try:
        tree = ast.parse((Path(package.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in {"EngineArgs", "AsyncEngineArgs"}]
    lines = [line for found in classes for line in found.body if isinstance(line, ast.AnnAssign)]
    fields = {line.target.id for line in lines if isinstance(line.target, ast.Name)}
    return fields if "gpu_memory_utilization" in fields else None


def _packages(config: RunConfig) -> Iterator[Problem]:
    """Those of optional features: key, whether its value needs the package, which has this name and is in this extra
    of ours, and a value that needs none."""
    for key, needs, package, extra, off in (
        ("model.lora.rank", config.model.lora.rank > 0, "peft", "lora", 0),
        ("learner.optimizer", config.learner.optimizer == "adamw_8bit", "torchao", "optim", "adamw_bf16"),
        ("telemetry.wandb", config.telemetry.wandb, "wandb", "wandb", "false"),
    ):
        if needs and importlib.util.find_spec(package) is None:
            hint = f'pip install "tandem-rl[{extra}]", or use {key}={off}'
            yield problem(config, key, f"needs the package {package}, which is not installed", hint)


def _port(config: RunConfig) -> Iterator[Problem]:
    port = config.learner.port
    if port == 0 or config.ray.address != "local":
        return  # rank 0 may be on another node: it finds out itself
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # Or a port whose last connection has just ended counts as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            message = f"cannot be used: {os.strerror(error.errno or 0)}"
            yield problem(config, "learner.port", message, "use another, or 0 for a free one")
