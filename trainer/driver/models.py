"""The models of a run before any weight is loaded: what their configs say, their vocabularies and tokenizers."""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import get_session

from rollout.engine.vllm_config import out_of_vocabulary
from rollout.prompts.datasets import reader_of_suffix
from rollout.rendering import load_tokenizer
from trainer.builtin.tiny_model import BUILTIN_TINY, RECIPE, VOCABULARY_SIZE, build_tokenizer
from trainer.config.schema import model_paths
from trainer.driver.named_files import context_problems, fit_problems, looks_local
from trainer.errors import ConfigurationError, ModelError, Problem
from trainer.learner.weights import check_weights, is_random_init

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rollout.types import Prompt
    from trainer.config.schema import RunConfig


# --- the hub ---

REACH_S = 5.0
"""For the first answer of the hub, name resolution included."""

_MODEL_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")


def hub_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Models, tokenizer and data sets that have to be downloaded while the hub does not answer.

    With HF_HUB_OFFLINE set nothing is asked: loading them reports that it is set. On a cluster that is joined, models
    may be where the learners are: only what this process reads counts.
    """
    if constants.HF_HUB_OFFLINE:
        return
    models, data = _models_to_fetch(cfg), _data_to_fetch(cfg)
    if not models and not data:
        return
    if (reason := _why_silent(next(iter({**models, **data})))) is not None:
        yield from (_unreachable(name, keys, "the model", "DIR", reason) for name, keys in models.items())
        yield from (_unreachable(name, keys, "the data set", "FILE", reason) for name, keys in data.items())


def _unreachable(name: str, keys: Sequence[str], what: str, place: str, reason: str) -> Problem:
    return Problem(
        key=keys[0],
        value=name,
        message=f"{what} is not in the cache of this machine, and the hub cannot be reached: {reason}",
        hint=f"check the network, or name a copy: {keys[0]}={place}; HF_HUB_OFFLINE=1 reads a cached one",
        related=tuple(keys[1:]),
    )


def _models_to_fetch(cfg: RunConfig) -> dict[str, list[str]]:
    """Name -> the keys that have it."""
    tokenizer = {"model.tokenizer_path": cfg.model.tokenizer_path}
    read_here = tokenizer if cfg.model.tokenizer_path else {"model.path": cfg.model.path}
    named = {**model_paths(cfg), **read_here} if cfg.ray.address == "local" else read_here
    return _by_name({key: name for key, name in named.items() if _is_of_hub(name) and not _is_model_cached(name)})


def _data_to_fetch(cfg: RunConfig) -> dict[str, list[str]]:
    """Name -> the keys that have it."""
    if cfg.task.reader not in {"auto", "hf"}:
        return {}
    named = {"task.train_path": cfg.task.train_path, **cfg.task.held_out_paths}
    of_hub = {key: name for key, name in named.items() if name and _is_of_hub(name) and reader_of_suffix(name) is None}
    return _by_name({key: name for key, name in of_hub.items() if not _is_data_cached(name.partition(":")[0])})


def _by_name(named: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, name in named.items():
        found.setdefault(name, []).append(key)
    return found


def _is_of_hub(name: str) -> bool:
    return not name.startswith("builtin:") and not looks_local(name)


def _is_model_cached(name: str) -> bool:
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _MODEL_FILES)


def _is_data_cached(name: str) -> bool:
    from datasets import config

    prepared = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")
    return prepared.is_dir() or isinstance(try_to_load_from_cache(name, "README.md", repo_type="dataset"), str)


def _why_silent(name: str) -> str | None:
    """Why the hub gives no answer at all about `name`; None if it gives any, a refusal included."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(f"{constants.ENDPOINT}/{name}", timeout=REACH_S)
        except Exception as error:  # noqa: BLE001 - which library it comes from depends on the version of the hub's
            answers.put(f"{constants.ENDPOINT}: {error}")
        else:
            answers.put(None)

    # No timeout of a connection covers name resolution, and a thread that waits for that must not keep us here.
    threading.Thread(target=ask, name="ask the hub", daemon=True).start()
    try:
        return answers.get(timeout=REACH_S)
    except queue.Empty:
        return f"{constants.ENDPOINT}: no answer within {REACH_S:g} s"


# --- configs and vocabularies ---

TEACHER = "algorithm.kl.reference_model"

_TOKENIZER_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError)
"""Of transformers, for files that are missing, damaged or of a kind that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model before its weights are loaded; read once."""

    key: str
    """The configuration key that names it."""
    path: str
    text: Mapping[str, Any] | None = None
    """The config of its text model; None where it cannot be had on this host: the learner reports why."""
    problems: tuple[Problem, ...] = ()
    """Why it cannot be trained, or cannot be used together with this configuration."""

    @property
    def vocab_size(self) -> int | None:
        """Rows of its embedding."""
        return None if self.text is None else int(self.text["vocab_size"])


def read_models(cfg: RunConfig) -> dict[str, ModelInfo]:
    """By key, the policy first. A critic of the hub is left to the learner: nothing here needs to know it."""
    return {key: _read_model(cfg, key, path) for key, path in model_paths(cfg).items()}


def _read_model(cfg: RunConfig, key: str, path: str) -> ModelInfo:
    if path == BUILTIN_TINY:
        heads = {"num_attention_heads": RECIPE.num_heads, "num_key_value_heads": RECIPE.num_kv_heads}
        text: Mapping[str, Any] = {**heads, "vocab_size": VOCABULARY_SIZE}
        problems = fit_problems(cfg, text, key=key) if key == "model.path" else ()
        return ModelInfo(key=key, path=path, text=text, problems=tuple(problems))
    from trainer.learner.model import check_packed, load_config  # they take torch and seconds

    directory = Path(path).expanduser()
    is_here = directory.is_dir()
    if not is_here and key == "critic.path":
        return ModelInfo(key=key, path=path)
    try:
        config = load_config(cfg.model, directory)
        if is_here:
            check_packed(config, directory, trust_remote_code=cfg.model.trust_remote_code)
        text = config.get_text_config().to_dict()
    except (ModelError, ValueError) as error:  # ValueError: several text models in one config
        is_elsewhere = not is_here and (key == TEACHER or isinstance(error.__cause__, OSError | ImportError))
        problem = Problem(key=key, value=path, message=" ".join(str(error).split()))
        return ModelInfo(key=key, path=path, problems=() if is_elsewhere else (problem,))
    # The config.json of a policy in a directory was looked at together with the configuration.
    check = context_problems if key == TEACHER else fit_problems
    problems = check(cfg, text, key=key) if key == TEACHER or not is_here else ()
    return ModelInfo(key=key, path=path, text=text, problems=tuple(problems))


def weight_problems(cfg: RunConfig, *, why_engines_read: str | None) -> Iterator[Problem]:
    """Models in directories are checked here; those of the hub when the learner has them, since they may be large.

    Args:
        why_engines_read: the key because of which engines load the weights of the policy themselves; None if none does.
    """
    model, related = cfg.model, "model.random_weights"
    for key, path in model_paths(cfg).items():
        directory = Path(path).expanduser()
        if not directory.is_dir():
            continue
        try:
            check_weights(directory, is_random_init=is_random_init(model, path))
        except ModelError as error:
            yield Problem(key=key, value=path, message=str(error), related=(related,))
    if not model.random_weights:
        return
    if not Path(model.path).expanduser().is_dir():
        message = f"must be the directory of a config without weights with {related}=true, which draws them"
        yield Problem(key="model.path", value=model.path, message=message, related=(related,))
    elif why_engines_read is not None:
        message = (
            f"must be a directory with weights: with {why_engines_read} engines load them, and this one has a config "
            "alone"
        )
        hint = "save the weights there (save_pretrained), or name another model"
        yield Problem(
            key="model.path", value=model.path, message=message, hint=hint, related=(why_engines_read, related)
        )


def policy_tokenizer(cfg: RunConfig) -> Any:
    """Raises ConfigurationError if it cannot be loaded."""
    key = "model.tokenizer_path" if cfg.model.tokenizer_path else "model.path"
    path = cfg.model.tokenizer_path if cfg.model.tokenizer_path else cfg.model.path
    if path == BUILTIN_TINY:
        return build_tokenizer()  # its directory may not be there yet
    try:
        return load_tokenizer(path, trust_remote_code=cfg.model.trust_remote_code)
    except _TOKENIZER_ERRORS as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "check the name or directory"
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"} and not Path(path).exists():
            hint = "HF_HUB_OFFLINE is set: unset it to download, or give a directory"
        problem = Problem(key=key, value=path, message=f"its tokenizer cannot be loaded: {first_line}", hint=hint)
        raise ConfigurationError([problem]) from error


def vocabulary_problems(cfg: RunConfig, policy: ModelInfo, tokenizer: Any) -> Iterator[Problem]:
    """Stop tokens that the tokenizer does not have, and tokens of another model's tokenizer that the embedding has no
    rows for. Added tokens do not count there: a padding token beyond the embedding is common, and `token_problems`
    looks at prompts one by one."""
    num_tokens = len(tokenizer)
    if unknown := [token_id for token_id in cfg.rollout.stop_token_ids if token_id >= num_tokens]:
        message = f"must be below {num_tokens}, the number of tokens that the tokenizer has"
        yield Problem(key="rollout.stop_token_ids", value=str(unknown), message=message)
    rows, size = policy.vocab_size, int(tokenizer.vocab_size)
    if cfg.model.tokenizer_path not in ("", cfg.model.path) and rows is not None and size > rows:
        yield Problem(
            key="model.tokenizer_path",
            value=cfg.model.tokenizer_path,
            message=f"has {size} tokens, but the embedding of {cfg.model.path} has {rows} rows",
            hint="use the tokenizer that came with the model: leave model.tokenizer_path empty",
            related=("model.path",),
        )


def token_problems(models: Iterable[ModelInfo], prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """The first prompt with a token for which a model has no row: it would end engine and learner."""
    known = [(info.vocab_size, info) for info in models if info.vocab_size is not None]
    if not known:
        return
    size, info = min(known, key=lambda entry: entry[0])
    for prompt in prompts:
        token = out_of_vocabulary(prompt.token_ids, size)
        if token is not None:
            message = f"has no token {token}, which prompt {prompt.prompt_id} has; its vocabulary is 0 to {size - 1}"
            hint = "set model.tokenizer_path to the model's own tokenizer, or resize the embedding of the model"
            yield Problem(key=info.key, value=info.path, message=message, hint=hint, related=("model.tokenizer_path",))
            return


# --- the teacher ---


def teacher_problems(cfg: RunConfig, models: Mapping[str, ModelInfo], tokenizer: Any) -> Iterator[Problem | str]:
    """Rows and tokens of the teacher against those of the policy, as far as its files are here or at the hub. A text is
    what could not be compared, for the log.

    Rows beyond the policy's are no problem: families pad their sizes differently. Nor are tokens that only one of the
    tokenizers names.

    Args:
        tokenizer: the policy's.
    """
    teacher = models.get(TEACHER)
    if teacher is None or teacher.problems:
        return
    path = teacher.path
    if teacher.vocab_size is None:  # the learner reports why; a hub that cannot be reached is waited for once
        yield f"{TEACHER}={path} cannot be read here: that its tokens are those of the policy is not checked"
        return
    at_least = models["model.path"].vocab_size
    if at_least is not None and teacher.vocab_size < at_least:
        message = f"has {teacher.vocab_size} tokens, the policy {at_least}: it has to judge whatever is sampled"
        yield _unfit_teacher(path, message)
        return
    theirs = _teacher_tokenizer(cfg, path)
    if theirs is None:
        yield f"{TEACHER}={path} has no tokenizer: that its tokens are those of the policy is not checked"
        return
    names = {index: token for token, index in theirs.get_vocab().items()}
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    if differing := sorted(index for index in names.keys() & ours.keys() if names[index] != ours[index]):
        first = differing[0]
        what = f"gives token {first} as {names[first]!r}, the policy's tokenizer as {ours[first]!r}"
        yield _unfit_teacher(path, f"{what} ({len(differing)} tokens differ)")


def _teacher_tokenizer(cfg: RunConfig, path: str) -> Any | None:
    if path == BUILTIN_TINY:
        return build_tokenizer()
    try:
        return load_tokenizer(path, trust_remote_code=cfg.model.trust_remote_code)
    except _TOKENIZER_ERRORS:
        return None


def _unfit_teacher(path: str, message: str) -> Problem:
    hint = "use a teacher of the policy's family, with the same tokenizer and at least as many rows"
    return Problem(key=TEACHER, value=path, message=message, hint=hint, related=("model.path",))
