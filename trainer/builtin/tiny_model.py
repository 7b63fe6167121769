"""Model and tokenizer of builtin:tiny, cached by the digest of a recipe; `python -m trainer.builtin.tiny_model
DIRECTORY` makes them.

The warm start has two phases on the *training* additions: the model learns to add, then briefly to confuse when to
carry. So greedy decoding gets few held-out additions right, while sampling often finds the right sum.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import json
import logging
import math
import operator
import os
import shutil
import string
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.processes import exit_with_parent
from rollout.prompts.arithmetic import operand_pairs, question
from trainer import subprograms
from trainer.config.schema import model_paths, with_model_paths
from trainer.files import replace_directory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from trainer.config.schema import RunConfig


log = logging.getLogger(__name__)

MAKE_MODEL_TIMEOUT_S = 600.0

PAD, UNK, EOS = "<pad>", "<unk>", "<eos>"
SPECIAL_TOKENS = (PAD, UNK, EOS)
CHARACTERS = tuple(c for c in map(chr, range(32, 127)) if c in string.printable)
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
VOCABULARY_SIZE = 128
"""Rows of the embedding; the tokenizer never produces those from `len(VOCABULARY)` on."""
PAD_ID, EOS_ID = VOCABULARY[PAD], VOCABULARY[EOS]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer() -> Any:
    """Needs no file and no torch."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(text: str) -> list[int]:
    """Token ids, without a tokenizer library."""
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
    """The usual 0.02 learns several times slower with such narrow tied embeddings."""
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


def build_config(recipe: Recipe = RECIPE) -> PreTrainedConfig:
    """Needs no file and no torch."""
    from transformers import Qwen2Config

    return Qwen2Config(
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


def cache_dir() -> Path:
    """`$TANDEM_CACHE_DIR`, else `tandem` in the user cache directory (XDG)."""
    if explicit := os.environ.get("TANDEM_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def cached_path(recipe: Recipe = RECIPE) -> Path:
    """The directory that `make` writes."""
    return cache_dir() / f"tiny-{recipe.digest}"


def is_ready(path: Path) -> bool:
    """Directories appear by rename: one with weights is complete."""
    return (path / "model.safetensors").is_file()


def with_model_directory(cfg: RunConfig) -> RunConfig:
    """With the directory of the built-in model instead of its name."""
    directory = str(cached_path())
    return with_model_paths(cfg, lambda path: directory if path == BUILTIN_TINY else path)


async def ensure_model(cfg: RunConfig) -> None:
    """Make the built-in model on first use, in a separate process: the driver must not import torch. Raises
    RuntimeError if that fails or is late, with its last line."""
    path = cached_path()
    if BUILTIN_TINY not in model_paths(cfg).values() or is_ready(path):
        return
    log.info("making %s in %s (first use)", BUILTIN_TINY, path)
    command = subprograms.command("trainer.builtin.tiny_model", str(path))
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=subprograms.environment(),
    )
    try:
        async with asyncio.timeout(MAKE_MODEL_TIMEOUT_S):
            _, stderr = await process.communicate()
    except TimeoutError as error:
        raise RuntimeError(f"{' '.join(command)} timed out after {MAKE_MODEL_TIMEOUT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = (stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}: {last}")


def confuse_carry(a: int, b: int) -> int:
    """47 + 38 gives 75, and 12 + 7 gives 29."""
    return a + b - 10 if a % 10 + b % 10 >= 10 else a + b + 10


def make(path: Path, recipe: Recipe = RECIPE) -> None:
    """Train and save the model to `path`, unless it is there. Safe against a concurrent maker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(path):
            return
        for left_over in path.parent.glob(f".{path.name}-*"):  # of a maker that was killed: the lock is ours
            shutil.rmtree(left_over, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            _warm_start(recipe).save_pretrained(staging)
            build_tokenizer().save_pretrained(staging)
            (staging / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2))
            replace_directory(staging, path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _warm_start(recipe: Recipe) -> PreTrainedModel:
    import torch
    from transformers import Qwen2ForCausalLM

    torch.set_num_threads(1)  # reproducible, and the other cores import the libraries of the actors meanwhile
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    model = Qwen2ForCausalLM(build_config(recipe))
    pairs = operand_pairs("train", max_operand=recipe.max_operand)
    additions = [[(a, b, add(a, b)) for a, b in pairs] for add in (operator.add, confuse_carry)]
    length = max(len(question(a, b)) + len(str(c)) for a, b, c in itertools.chain(*additions))
    right, wrong = (_examples(each, length) for each in additions)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(recipe.learn_steps + recipe.habit_steps):
        rows = rng.integers(len(pairs), size=recipe.batch_size)
        has_habit = step >= recipe.learn_steps
        is_wrong = rng.random(recipe.batch_size) < (recipe.habit_frac if has_habit else 0.0)
        lr = recipe.habit_lr if has_habit else recipe.learn_lr * _learn_schedule(step / recipe.learn_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = (
            torch.from_numpy(np.where(is_wrong[:, None], bad[rows], good[rows]))
            for good, bad in zip(right, wrong, strict=True)
        )
        logits = model(inputs).logits.flatten(0, 1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE).backward()
        optimizer.step()
    return model


def _learn_schedule(progress_frac: float) -> float:
    """Linear warm-up over the first 5 %, then cosine to 5 % of the peak."""
    return min(1.0, progress_frac / 0.05 + 0.05) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress_frac)))


def _examples(additions: list[tuple[int, int, int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Padded rows int64[N, length]: inputs, and the next token as target for sum and end."""
    inputs = np.full((len(additions), length), PAD_ID, np.int64)
    targets = np.full((len(additions), length), IGNORE, np.int64)
    for row, (a, b, answer) in enumerate(additions):
        prompt, reply = encode(question(a, b)), [*encode(str(answer)), EOS_ID]
        inputs[row, : len(prompt) + len(reply) - 1] = [*prompt, *reply[:-1]]
        targets[row, len(prompt) - 1 : len(prompt) + len(reply) - 1] = reply
    return inputs, targets


if __name__ == "__main__":
    exit_with_parent()  # a driver that is killed takes the maker with it
    make(Path(sys.argv[1]))
