"""Model and tokenizer of builtin:tiny.

The warm start has two phases on the *training* additions only. First it learns to add. Then it is taught, for a
moment, to mix up when to carry in most of them. Greedy decoding therefore gets few of the held-out additions right,
while the right answer is still well within reach of sampling.

The result is cached: it depends only on the recipe below, so its directory is named after the recipe's digest.
Run as `python -m trainer.builtin.tiny_model DIRECTORY` it makes the model in a process of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import string
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.processes import exit_with_parent
from rollout.prompts.arithmetic import operand_pairs, question
from trainer import subprograms
from trainer.config.schema import model_paths, with_model_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

    from trainer.config.schema import RunConfig


log = logging.getLogger(__name__)

MAKE_MODEL_TIMEOUT_S = 600.0

PAD, UNK, EOS = "<pad>", "<unk>", "<eos>"
SPECIAL_TOKENS = (PAD, UNK, EOS)
CHARACTERS = tuple(c for c in map(chr, range(32, 127)) if c in string.printable)
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
VOCABULARY_SIZE = 128
"""Rows of the embedding; the few above `len(VOCABULARY)` are never produced by the tokenizer."""
PAD_ID, EOS_ID = VOCABULARY[PAD], VOCABULARY[EOS]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer() -> Any:
    """A fast Hugging Face tokenizer (needs no file and no torch)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(text: str) -> list[int]:
    """Token ids of `text` without importing a tokenizer library; unknown characters become `<unk>`."""
    return [VOCABULARY.get(character, VOCABULARY[UNK]) for character in text]


BUILTIN_TINY = "builtin:tiny"
IGNORE = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything the weights depend on."""

    revision: int = 2
    seed: int = 0
    max_operand: int = 49
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    initializer_range: float = 0.08
    """With tied embeddings this narrow, the usual 0.02 learns several times slower."""
    batch_size: int = 96
    learn_steps: int = 600
    learn_lr: float = 3e-3
    habit_steps: int = 80
    habit_lr: float = 1e-3
    habit_frac: float = 0.6
    """Share of wrong answers in the second phase."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


RECIPE = Recipe()


def cache_dir() -> Path:
    """`$TANDEM_CACHE_DIR`, else `tandem` in the user cache directory (XDG)."""
    explicit = os.environ.get("TANDEM_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"


def cached_path(recipe: Recipe = RECIPE) -> Path:
    """Where the finished model lies, or will lie once `make` has run."""
    return cache_dir() / f"tiny-{recipe.digest}"


def is_ready(path: Path) -> bool:
    """Directories appear by rename, so one that has its weights is complete."""
    return (path / "model.safetensors").is_file()


def with_model_directory(cfg: RunConfig) -> RunConfig:
    """The configuration with built-in names replaced by the directories that actors load from."""
    directory = str(cached_path())
    return with_model_paths(cfg, lambda path: directory if path == BUILTIN_TINY else path)


async def ensure_model(cfg: RunConfig) -> None:
    """Make the built-in model on first use, in a process of its own, so that the driver stays free and light.

    Raises:
        RuntimeError: its process failed or took too long.
    """
    path = cached_path()
    if BUILTIN_TINY not in model_paths(cfg).values() or is_ready(path):
        return
    log.info("making %s in %s (first use)", BUILTIN_TINY, path)
    command = subprograms.command("trainer.builtin.tiny_model", str(path))
    await _run_to_end(command, timeout_s=MAKE_MODEL_TIMEOUT_S)


async def _run_to_end(command: list[str], *, timeout_s: float) -> None:
    """Run a process to its end; it never outlives this call. Raises RuntimeError with its last words."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=subprograms.environment(),
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, stderr = await process.communicate()
    except TimeoutError as error:
        raise RuntimeError(f"{' '.join(command)} did not end within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = (stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}: {last}")


def confuse_carry(a: int, b: int) -> int:
    """The sum of `a` and `b` by someone who mixes up when to carry: 47 + 38 gives 75, and 12 + 7 gives 29."""
    has_carry = a % 10 + b % 10 >= 10
    return a + b - 10 if has_carry else a + b + 10


def make(path: Path, recipe: Recipe = RECIPE) -> None:
    """Train and save the model to `path`, unless it is there already. Safe against a concurrent maker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if is_ready(path):
            return
        for left_over in path.parent.glob(f".{path.name}-*"):  # of a maker that was killed: the lock is ours
            shutil.rmtree(left_over, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            _warm_start(recipe).save_pretrained(staging)
            build_tokenizer().save_pretrained(staging)
            (staging / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2))
            staging.rename(path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _warm_start(recipe: Recipe) -> PreTrainedModel:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)  # the other cores import the libraries of the actors meanwhile; and one is reproducible
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=recipe.hidden_size,
            intermediate_size=4 * recipe.hidden_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_kv_heads,
            initializer_range=recipe.initializer_range,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )
    )
    pairs = operand_pairs("train", max_operand=recipe.max_operand)
    right = _Examples([(a, b, a + b) for a, b in pairs])
    wrong = _Examples([(a, b, confuse_carry(a, b)) for a, b in pairs])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(recipe.learn_steps + recipe.habit_steps):
        rows = rng.integers(len(pairs), size=recipe.batch_size)
        has_habit = step >= recipe.learn_steps
        forgets = rng.random(recipe.batch_size) < (recipe.habit_frac if has_habit else 0.0)
        lr = recipe.habit_lr if has_habit else recipe.learn_lr * _learn_schedule(step / recipe.learn_steps)
        inputs, targets = right.pick(rows, wrong, forgets)
        _supervised_step(model, optimizer, inputs, targets, lr=lr)
    return model


def _learn_schedule(progress_frac: float) -> float:
    """Linear warm-up over the first 5 %, then cosine to 5 % of the peak."""
    return min(1.0, progress_frac / 0.05 + 0.05) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress_frac)))


def _supervised_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, inputs: np.ndarray, targets: np.ndarray, *, lr: float
) -> None:
    import torch

    for group in optimizer.param_groups:
        group["lr"] = lr
    logits = model(torch.from_numpy(inputs)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=IGNORE
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class _Examples:
    """Additions with (right or wrong) answers as padded rows: int64[N, L] inputs, and the next token as target."""

    def __init__(self, additions: list[tuple[int, int, int]]) -> None:
        length = max(len(question(a, b)) + len(str(c)) for a, b, c in additions)
        self.inputs = np.full((len(additions), length), PAD_ID, np.int64)
        self.targets = np.full((len(additions), length), IGNORE, np.int64)
        for row, (a, b, answer) in enumerate(additions):
            prompt, reply = encode(question(a, b)), [*encode(str(answer)), EOS_ID]
            self.inputs[row, : len(prompt) + len(reply) - 1] = [*prompt, *reply[:-1]]
            self.targets[row, len(prompt) - 1 : len(prompt) + len(reply) - 1] = reply

    def pick(self, rows: np.ndarray, other: _Examples, takes_other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of this set, or of `other` where `takes_other` is True."""
        width = max(self.inputs.shape[1], other.inputs.shape[1])
        inputs = np.where(takes_other[:, None], other._wide(rows, width)[0], self._wide(rows, width)[0])
        targets = np.where(takes_other[:, None], other._wide(rows, width)[1], self._wide(rows, width)[1])
        return inputs, targets

    def _wide(self, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        pad = ((0, 0), (0, width - self.inputs.shape[1]))
        return (
            np.pad(self.inputs[rows], pad, constant_values=PAD_ID),
            np.pad(self.targets[rows], pad, constant_values=IGNORE),
        )


if __name__ == "__main__":
    exit_with_parent()  # a driver that is killed takes the maker with it
    make(Path(sys.argv[1]))
