"""The files, directories, packages and ports that a configuration names: problems that show without torch or network.

`python -m trainer` reports them together with those of the configuration itself. Names of a hub are taken as they are
(`models.py` looks at those), and devices are counted by `preflight.py`.
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
from trainer.config.schema import model_paths
from trainer.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.config.schema import RunConfig


_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".arrow")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_MODEL_CONFIG = "config.json"


def file_problems(config: RunConfig) -> list[Problem]:
    """Every file, directory, package or port that the run would need and cannot have."""
    checks = (_run_dir, _models, _data, _reward, _engine_args, _resume, _wandb, _port)
    return [problem for check in checks for problem in check(config)]


def looks_local(name: str) -> bool:
    """Whether `name` can only be a path: a hub name is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _run_dir(config: RunConfig) -> Iterator[Problem]:
    key, wanted = "run_dir", Path(config.run_dir or "runs")
    if config.run_dir and wanted.exists() and not wanted.is_dir():
        hint = "name a directory, new or of an earlier run"
        yield Problem(key=key, value=str(wanted), message="is a file", hint=hint)
        return
    existing = next(parent for parent in [wanted, *wanted.absolute().parents] if parent.exists())
    try:
        # Asking the file system is the only way to know: permissions do not tell about read-only mounts.
        Path(tempfile.mkdtemp(prefix=".tandem-", dir=existing)).rmdir()
    except OSError as error:
        hint = "choose another directory with run_dir=PATH"
        message = f"cannot be written: {existing}: {error.strerror}"
        yield Problem(key=key, value=config.run_dir or "runs", message=message, hint=hint)


def _models(config: RunConfig) -> Iterator[Problem]:
    """Critic and teacher have the policy's tokenizer, and count where they are used."""
    model, algorithm = config.model, config.algorithm
    is_used = {"critic.path": algorithm.uses_critic, "algorithm.kl.reference_model": algorithm.kl.coef > 0}
    for key, path in model_paths(config).items():
        if not is_used.get(key, True):
            continue
        if path.startswith("builtin:"):
            if path != "builtin:tiny":
                yield Problem(key=key, value=path, message="the only built-in model is builtin:tiny")
        elif not path:
            yield Problem(key=key, value='""', message="must name a model", hint="use builtin:tiny or a directory")
        elif looks_local(path):
            yield from _model_directory(config, key, path)
    if model.tokenizer_path and (model.tokenizer_path.startswith("builtin:") or looks_local(model.tokenizer_path)):
        yield from _tokenizer_directory("model.tokenizer_path", Path(model.tokenizer_path))


def _model_directory(config: RunConfig, key: str, path: str) -> Iterator[Problem]:
    described, problems = _model_config(key, path)
    yield from problems
    is_policy = key == "model.path"
    if is_policy and not config.model.tokenizer_path and (Path(path) / _MODEL_CONFIG).is_file():
        yield from _tokenizer_directory(key, Path(path))
    if not problems:
        yield from (fit_problems if is_policy else context_problems)(config, _of_text(described), key=key)


def _model_config(key: str, got: str) -> tuple[dict[str, Any], list[Problem]]:
    """What the config.json of the model at a local path says, and what keeps it from being read."""
    path = Path(got)
    if not (path / _MODEL_CONFIG).is_file():
        what = (
            f"has no {_MODEL_CONFIG}" if path.is_dir() else "is not a directory" if path.exists() else "does not exist"
        )
        related = ", or builtin:tiny" if key == "model.path" else ""
        hint = f"give the directory of a Hugging Face model, a hub name (owner/name){related}"
        return {}, [Problem(key=key, value=got, message=what, hint=hint)]
    try:
        described = json.loads((path / _MODEL_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"its {_MODEL_CONFIG} cannot be read: {error}"
        return {}, [Problem(key=key, value=got, message=what, hint="download the model again")]
    return cast("dict[str, Any]", described) if isinstance(described, dict) else {}, []


def fit_problems(config: RunConfig, text: Mapping[str, Any], *, key: str) -> Iterator[Problem]:
    """What the engine would refuse only after it has started.

    Args:
        text: the config of the text model that `key` names.
    """
    yield from _parallel_problems(config.rollout.tensor_parallel_size, text, path=model_paths(config)[key])
    yield from context_problems(config, text, key=key)


def context_problems(config: RunConfig, text: Mapping[str, Any], *, key: str) -> Iterator[Problem]:
    """Whether prompt and answer fit into the context of the model; `text` as for `fit_problems`."""
    path = model_paths(config)[key]
    context = text.get("max_position_embeddings")
    scaled = any(_stretches_context(text.get(name)) for name in ("rope_scaling", "rope_parameters"))
    longest = max(longest_sequence(config), config.rollout.max_model_len)
    if isinstance(context, int) and longest > context and not scaled:
        yield Problem(
            key="rollout.max_response_tokens",
            value=str(config.rollout.max_response_tokens),
            message=f"prompt and answer need {longest} tokens, but the context of {path} has {context}",
            hint="lower rollout.max_response_tokens, task.max_prompt_tokens or rollout.max_model_len",
            related=("task.max_prompt_tokens", "rollout.max_model_len", key),
        )


def _of_text(described: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = described.get("text_config")
    return cast("dict[str, Any]", nested) if isinstance(nested, dict) else described


def _parallel_problems(parallel: int, text: Mapping[str, Any], *, path: str) -> Iterator[Problem]:
    """Every device of an engine gets as many heads as any other; one of keys and values may be on several."""
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(heads, int) and heads % parallel:
        message = f"must divide the {heads} attention heads of {path}"
    elif isinstance(kv_heads, int) and kv_heads > 0 and kv_heads % parallel and parallel % kv_heads:
        message = f"must divide the {kv_heads} key-value heads of {path}, or be a multiple of them"
    else:
        return
    yield Problem(key="rollout.tensor_parallel_size", value=str(parallel), message=message, related=("model.path",))


def _stretches_context(rope: Any) -> bool:
    """Whether rotary embeddings are scaled; Transformers 5 writes `rope_parameters` for models without scaling too."""
    return isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default"  # pyright: ignore


def _tokenizer_directory(key: str, path: Path) -> Iterator[Problem]:
    if any((path / name).is_file() for name in _TOKENIZER_FILES):
        return
    what = f"has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})" if path.is_dir() else "does not exist"
    yield Problem(
        key=key, value=str(path), message=what, hint="set model.tokenizer_path to a tokenizer", related=("model.path",)
    )


def _data(config: RunConfig) -> Iterator[Problem]:
    task = config.task
    for key, name in {"task.train_path": task.train_path, **task.held_out_paths}.items():
        if name.startswith("builtin:"):
            if name != "builtin:arithmetic":
                yield Problem(key=key, value=name, message="the only built-in task is builtin:arithmetic")
            continue
        is_file = name.endswith(_DATA_SUFFIXES) or task.reader in {"jsonl", "parquet"}
        if name and (is_file or looks_local(name)) and not Path(name).exists():
            hint = "give a file, a directory, a hub name (owner/name) or builtin:arithmetic"
            yield Problem(key=key, value=name, message="does not exist", hint=hint, related=("task.reader",))


def _reward(config: RunConfig) -> Iterator[Problem]:
    file, colon, function = config.task.reward.name.rpartition(":")
    if not colon or not file.endswith(".py"):
        return
    key, got = "task.reward.name", config.task.reward.name
    if not Path(file).is_file():
        yield Problem(
            key=key, value=got, message=f"the file {file} does not exist", hint="give path/to/file.py:function"
        )
    elif not function.isidentifier():
        yield Problem(key=key, value=got, message=f"{function!r} is not the name of a function")


def _resume(config: RunConfig) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    if resume in {"auto", "never"}:
        return
    if not resume or not Path(resume).is_dir():
        hint = "use auto, never, or the directory of a checkpoint (run_dir/checkpoints/step_N)"
        yield Problem(key="checkpoint.resume", value=resume or '""', message="is not a directory", hint=hint)


def _engine_args(config: RunConfig) -> Iterator[Problem]:
    known = _fields_of_engine_args() if config.rollout.engine_args else None
    if known is None:
        return
    for name, value in config.rollout.engine_args.items():
        if name in known or name in REFUSED_ENGINE_ARGS:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "see the arguments of vllm.AsyncEngineArgs"
        message = f"must hold arguments of vLLM's engine alone: it has no {name}"
        yield Problem(key="rollout.engine_args", value=f"{name}: {value}", message=message, hint=hint)


def _fields_of_engine_args() -> set[str] | None:
    """Read from vLLM's source, since its import takes many seconds. None without vLLM, or if it looks different."""
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


def _wandb(config: RunConfig) -> Iterator[Problem]:
    if config.telemetry.wandb and importlib.util.find_spec("wandb") is None:
        hint = 'pip install "tandem-rl[wandb]", or use telemetry.wandb=false'
        yield Problem(
            key="telemetry.wandb", value="true", message="needs the package wandb, which is not installed", hint=hint
        )


def _port(config: RunConfig) -> Iterator[Problem]:
    port = config.learner.port
    if port == 0 or config.ray.address != "local":
        return  # rank 0 may be on another node: it finds out itself
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # Without this, a port whose last connection has just ended would count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            message = f"cannot be used: {os.strerror(error.errno or 0)}"
            yield Problem(key="learner.port", value=str(port), message=message, hint="use another, or 0 for a free one")
