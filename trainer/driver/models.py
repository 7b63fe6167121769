"""The models of a run before any weight is loaded: their configs, vocabularies and tokenizers."""

from __future__ import annotations

import os
import queue
import threading
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import get_session

from rollout.engine.vllm_config import out_of_vocabulary
from rollout.prompts.datasets import reader_of_suffix
from rollout.rendering import load_tokenizer
from trainer.builtin.tiny_model import BUILTIN_TINY, build_config, build_tokenizer
from trainer.config.schema import model_paths, problem
from trainer.driver.named_files import fit_problems, looks_local
from trainer.errors import ConfigurationError, ModelError, Problem
from trainer.learner.weights import check_weights, is_random_init

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedConfig

    from rollout.types import Prompt
    from trainer.config.schema import RunConfig


# --- the hub ---

REACH_TIMEOUT_S = 5.0
"""For the first response of the hub, name resolution included."""


def hub_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Models, tokenizer and data sets that must be downloaded while the hub does not respond.

    With HF_HUB_OFFLINE the hub is not asked: loading reports that it is set. On a joined cluster, where learners may
    have the models, only what this process reads counts.
    """
    if constants.HF_HUB_OFFLINE:
        return
    tokenizer = {"model.tokenizer_path": cfg.model.tokenizer_path}
    models = tokenizer if cfg.model.tokenizer_path else {"model.path": cfg.model.path}
    if cfg.ray.address == "local":
        models = {**model_paths(cfg), **models}
    is_read = cfg.task.reader in {"auto", "hf"}
    data = {"task.train_path": cfg.task.train_path, **cfg.task.held_out_paths} if is_read else {}
    missing: dict[str, list[str]] = {}  # name -> the keys that have it
    for key, name in {**models, **data}.items():
        is_of_hub = name and not name.startswith("builtin:") and not looks_local(name)
        if is_of_hub and not (_is_model_cached(name) if key in models else _is_data_cached(name)):
            missing.setdefault(name, []).append(key)
    if not missing or (reason := _why_unreachable(next(iter(missing)))) is None:
        return
    for name, (key, *related) in missing.items():
        what, place = ("the model", "DIR") if key in models else ("the data set", "FILE")
        message = f"{what} is not in the cache of this machine, and the hub cannot be reached: {reason}"
        hint = f"check the network, or name a copy: {key}={place}; HF_HUB_OFFLINE=1 reads a cached one"
        yield Problem(key=key, value=name, message=message, hint=hint, related=tuple(related))


def _is_model_cached(name: str) -> bool:
    files = ("config.json", "tokenizer_config.json", "tokenizer.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def _is_data_cached(name: str) -> bool:
    from datasets import config

    if reader_of_suffix(name) is not None:
        return True  # a file
    repository = name.partition(":")[0]
    card = try_to_load_from_cache(repository, "README.md", repo_type="dataset")
    return isinstance(card, str) or (Path(config.HF_DATASETS_CACHE) / repository.replace("/", "___")).is_dir()


def _why_unreachable(name: str) -> str | None:
    """None if the hub responds to a request for `name`, even with a refusal."""
    responses: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(f"{constants.ENDPOINT}/{name}", timeout=REACH_TIMEOUT_S)
            responses.put(None)
        except Exception as error:  # noqa: BLE001 - which library it comes from depends on the version of the hub's
            responses.put(f"{constants.ENDPOINT}: {error}")

    # A daemon: the timeout of a connection does not cover name resolution.
    threading.Thread(target=ask, name="ask the hub", daemon=True).start()
    try:
        return responses.get(timeout=REACH_TIMEOUT_S)
    except queue.Empty:
        return f"{constants.ENDPOINT} timed out after {REACH_TIMEOUT_S:g} s"


# --- configs and weights ---

TEACHER = "algorithm.kl.reference_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model before its weights are loaded."""

    key: str
    """The configuration key that names it."""
    path: str
    config: PreTrainedConfig | None = None
    error: str = ""
    """Why there is no config."""
    is_elsewhere: bool = False
    """Learners may be able to read it; if not, they report why."""

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding."""
        return None if self.config is None else int(self.config.get_text_config().vocab_size)


def beside_policy(cfg: RunConfig, models: Mapping[str, ModelInfo]) -> tuple[ModelInfo | None, ModelInfo | None]:
    """Whose weights the learner holds as well: a critic with a backbone of its own, and `algorithm.kl.reference_model`.
    `models` as of `read_models`."""
    has_critic = cfg.algorithm.uses_critic and not cfg.critic.shared_backbone
    critic = models.get("critic.path", models["model.path"]) if has_critic else None
    return critic, models.get(TEACHER)


def read_models(cfg: RunConfig) -> dict[str, ModelInfo]:
    """By key, the policy first."""
    return {key: _read_model(cfg, key, path) for key, path in model_paths(cfg).items()}


def _read_model(cfg: RunConfig, key: str, path: str) -> ModelInfo:
    if path == BUILTIN_TINY:  # its directory may not exist yet
        return ModelInfo(key=key, path=path, config=build_config())
    from trainer.learner.model import check_packed, load_config  # imports torch for seconds

    directory = Path(path).expanduser()
    try:
        config = load_config(cfg.model, directory)
        config.get_text_config()
        if directory.is_dir():
            check_packed(config, directory, cfg)
    except (ModelError, ValueError) as error:  # ValueError: several text models in one config
        is_elsewhere = not directory.is_dir() and isinstance(error.__cause__, OSError | ImportError)
        return ModelInfo(key=key, path=path, error=" ".join(str(error).split()), is_elsewhere=is_elsewhere)
    return ModelInfo(key=key, path=path, config=config)


def model_problems(cfg: RunConfig, info: ModelInfo) -> Iterator[Problem]:
    if info.config is not None:
        yield from fit_problems(cfg, info.config.get_text_config().to_dict(), key=info.key)
    elif not info.is_elsewhere:
        yield problem(cfg, info.key, info.error)


def weight_problems(cfg: RunConfig, *, why_read: str | None) -> Iterator[Problem]:
    """Of models in directories; the learner checks those of the hub, which may be large. `why_read` is the key that
    makes engines load the policy's weights; None if they do not."""
    model, related = cfg.model, "model.random_weights"
    for key, path in model_paths(cfg).items():
        directory = Path(path).expanduser()
        if not directory.is_dir():
            continue
        try:
            check_weights(directory, is_random_init=is_random_init(model, path))
        except ModelError as error:
            yield problem(cfg, key, str(error), "", related)
    if not model.random_weights:
        return
    if not Path(model.path).expanduser().is_dir():
        message = f"must be the directory of a config without weights with {related}=true, which draws them"
        yield problem(cfg, "model.path", message, "", related)
    elif why_read is not None:
        message = f"must be a directory with weights: with {why_read} engines load them, and this one has only a config"
        hint = "save the weights there (save_pretrained), or name another model"
        yield problem(cfg, "model.path", message, hint, why_read, related)


# --- tokenizers and vocabularies ---

LOSS_SAMPLE = 64
"""Prompts that are decoded to see whether the tokenizer loses characters."""
_TOKENIZER_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError)
"""Of transformers, for missing, damaged or unknown files."""


def policy_tokenizer(cfg: RunConfig) -> Any:
    """Raises ConfigurationError if it cannot be loaded."""
    key, path = "model.path", cfg.model.path
    if cfg.model.tokenizer_path:
        key, path = "model.tokenizer_path", cfg.model.tokenizer_path
    try:
        return _tokenizer(cfg, path)
    except _TOKENIZER_ERRORS as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "check the name or directory"
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"} and not Path(path).exists():
            hint = "HF_HUB_OFFLINE is set: unset it to download, or give a directory"
        raise ConfigurationError([problem(cfg, key, f"its tokenizer cannot be loaded: {first_line}", hint)]) from error


def _tokenizer(cfg: RunConfig, path: str) -> Any:
    if path == BUILTIN_TINY:
        return build_tokenizer()
    return load_tokenizer(path, trust_remote_code=cfg.model.trust_remote_code)


def vocabulary_problems(cfg: RunConfig, policy: ModelInfo, tokenizer: Any) -> Iterator[Problem]:
    """Stop tokens that the tokenizer lacks, and a tokenizer of another model with more tokens than the embedding has
    rows; added tokens do not count, since padding beyond the embedding is common (`token_problems` checks each
    prompt)."""
    num_tokens = len(tokenizer)
    if unknown := [token_id for token_id in cfg.rollout.stop_token_ids if token_id >= num_tokens]:
        message = f"must be below {num_tokens}, the number of tokens that the tokenizer has"
        yield Problem(key="rollout.stop_token_ids", value=str(unknown), message=message)
    rows, size = policy.vocab_size, int(tokenizer.vocab_size)
    if cfg.model.tokenizer_path not in ("", cfg.model.path) and rows is not None and size > rows:
        message = f"has {size} tokens, but the embedding of {cfg.model.path} has {rows} rows"
        hint = "use the tokenizer that came with the model: leave model.tokenizer_path empty"
        yield problem(cfg, "model.tokenizer_path", message, hint, "model.path")


def token_problems(models: Iterable[ModelInfo], prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """The first prompt with a token that a model has no row for, which would end engine and learner."""
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


def lost_characters(tokenizer: Any, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Warns of characters that do not come back from the tokens, so the policy does not see them. White space, case and
    compatible forms do not count, since tokenizers normalize them."""
    sample = prompts[:: -(-len(prompts) // LOSS_SAMPLE)]
    unknown = getattr(tokenizer, "unk_token", None)
    lost, example = Counter[str](), ""
    for prompt in sample:
        decoded = tokenizer.decode([int(token) for token in prompt.token_ids], skip_special_tokens=False)
        missing = _plain(prompt.text) - _plain(decoded.replace(unknown, "") if unknown else decoded)
        if missing and not lost:
            example = f"{prompt.text[:60]!r} (prompt {prompt.prompt_id}) is {decoded[:60]!r} to the policy"
        lost += missing
    if lost:
        characters = " ".join(character for character, _ in lost.most_common(8))
        yield (
            f"the tokenizer loses {lost.total()} characters ({characters}) of {len(sample)} prompts that were decoded: "
            f"{example}; use a model whose tokenizer has them, or other prompts"
        )


def _plain(text: str) -> Counter[str]:
    folded = unicodedata.normalize("NFKC", text.casefold())
    return Counter(c for c in folded if unicodedata.category(c)[0] not in "MCZ" and not c.isspace())


# --- the teacher ---


def teacher_problems(cfg: RunConfig, models: Mapping[str, ModelInfo], tokenizer: Any) -> Iterator[Problem | str]:
    """Compares rows and tokens of the teacher with those of the policy, which has this `tokenizer`; a text warns that
    they cannot be compared. More rows than the policy's (padding) and tokens that one tokenizer alone names are
    fine."""
    teacher, rows = models.get(TEACHER), models["model.path"].vocab_size
    if teacher is None or (teacher.error and not teacher.is_elsewhere):
        return
    unchecked = "whether its tokens are those of the policy is not checked"
    hint = "use a teacher of the policy's family, with the same tokenizer and at least as many rows"
    if teacher.vocab_size is None:  # the learner reports why; the hub is waited for only once
        yield f"{TEACHER}={teacher.path} cannot be read here: {unchecked}"
        return
    if rows is not None and teacher.vocab_size < rows:
        message = f"has {teacher.vocab_size} tokens, the policy {rows}: it has to score whatever is sampled"
        yield problem(cfg, TEACHER, message, hint, "model.path")
        return
    try:
        theirs = _tokenizer(cfg, teacher.path).get_vocab()
    except _TOKENIZER_ERRORS:
        yield f"{TEACHER}={teacher.path} has no tokenizer: {unchecked}"
        return
    names = {index: token for token, index in theirs.items()}
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    if differing := sorted(index for index in names.keys() & ours.keys() if names[index] != ours[index]):
        first = differing[0]
        message = f"gives token {first} as {names[first]!r}, the policy's tokenizer as {ours[first]!r}"
        yield problem(cfg, TEACHER, f"{message} ({len(differing)} tokens differ)", hint, "model.path")
