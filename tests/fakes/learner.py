"""Tiny models, packed batches and process groups for tests of the learner."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.fakes.forks import RANKS, forks
from tests.fakes.patience import PATIENT_S
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.schema import LearnerConfig, LoraConfig, ModelConfig, RolloutConfig, RunConfig
from trainer.data.batch import MicroBatch
from trainer.learner import checkpoint
from trainer.learner.fsdp import sharded_like
from trainer.learner.model import check_packed, load_config
from trainer.learner.packed_inputs import scatter_to_tokens
from trainer.learner.policy import PolicyTrainer
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from trainer.learner.optimizer import ShardedOptimizer

NEEDS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
VOCAB = 61
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**TINY, head_dim=12),
    "llama": lambda: LlamaConfig(**TINY),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=5),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **TINY, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "gemma2": lambda: Gemma2Config(
        **TINY, head_dim=8, query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **TINY, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0
    ),
}  # fmt: skip


def save_tiny(directory: Path, kind: str = "qwen2", *, seed: int = 0) -> Path:
    """A random model with weights large enough that attention matters; returns its directory."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.randn(param.shape) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(directory)
    return directory


def run_config(model_dir: Path, **learner: Any) -> RunConfig:
    """float32 throughout, plain token mean, a learning rate that shows."""
    return RunConfig(
        model=ModelConfig(path=str(model_dir), compute_dtype="float32", rollout_dtype="float32"),
        learner=LearnerConfig(**{"lr": 1e-3, "max_grad_norm": 1e9, "logprob_chunk_size": 7, **learner}),
        algorithm=AlgorithmConfig(),
        rollout=RolloutConfig(temperature=0.8),
    )


def drawn_config(model_dir: Path, **learner: Any) -> RunConfig:
    """The same for a directory without weights: they are drawn from the seed."""
    cfg = run_config(model_dir, **learner)
    return replace(cfg, model=replace(cfg.model, random_weights=True))


def sequences(num: int, *, seed: int = 0, longest: int = 23) -> list[MicroBatch]:
    """`num` single-sequence batches whose weights are those of one step over all of them."""
    rng, parts = np.random.default_rng(seed), []
    for _ in range(num):
        length = int(rng.integers(3, longest + 1))
        mask = np.zeros(length, bool)
        mask[int(rng.integers(1, length - 1)) :] = True
        part = one_sequence(rng, mask)
        parts.append(replace(part, advantages=np.where(mask, rng.normal(), 0).astype(np.float32)))
    return weighted(parts)


def one_sequence(rng: np.random.Generator, mask: np.ndarray, **more: Any) -> MicroBatch:
    """Without advantages; every loss token of version 0 and of weight 1."""
    length = len(mask)
    return MicroBatch(
        cu_seqlens=np.array([0, length], np.int32),
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, rng.normal(-4, 0.3, length), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.zeros(length, np.float32),
        loss_weights=mask.astype(np.float32),
        **more,
    )


def weighted(parts: Sequence[MicroBatch]) -> list[MicroBatch]:
    """As one step over all of them."""
    total = np.float32(sum(int(part.loss_mask.sum()) for part in parts))
    return [replace(part, loss_weights=part.loss_weights / total) for part in parts]


def pack(parts: Sequence[MicroBatch]) -> MicroBatch:
    lengths = [len(part.token_ids) for part in parts]
    names = ["token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages", "loss_weights"]
    names += [name for name in ("token_rewards", "response_index") if getattr(parts[0], name) is not None]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return MicroBatch(cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), **arrays)


def without_loss() -> MicroBatch:
    """What a rank that ran out of samples gets."""
    zeros = np.zeros(2, np.float32)
    return MicroBatch(
        cu_seqlens=np.array([0, 2], np.int32),
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.zeros(2, bool),
        behavior_logprobs=zeros,
        versions=np.full(2, -1, np.int32),
        advantages=zeros,
        loss_weights=zeros,
    )


@contextlib.contextmanager
def process_group(store_file: Path, *, rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """A gloo group that meets in a file.

    DTensor keeps groups of the thread in a cache, whose end in a forked child joins threads that are not there.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(str(store_file), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


def make_learner(cfg: RunConfig) -> PolicyTrainer:
    """A learner in the open process group."""
    return PolicyTrainer(cfg, device=torch.device("cpu"), backend=get_backend("cpu"))


def check_model(directory: Path, **learner: Any) -> None:
    """As preflight does, of the model alone."""
    cfg = run_config(directory, **learner)
    check_packed(load_config(cfg.model, directory), directory, cfg)


def logprobs(learner: PolicyTrainer, batch: MicroBatch) -> np.ndarray:
    """Of the loss tokens under the current weights, after temperature: float32[T], 0 outside `loss_mask`."""
    return scatter_to_tokens(learner._built.no_grad_forward(batch).logprobs_L, batch)


def gradients(
    learner: PolicyTrainer, micro_batches: Sequence[MicroBatch], *, step: int = 0, **rewards: Any
) -> dict[str, torch.Tensor]:
    """Whole gradients of policy and critic in one step, which is then not taken; of their first update only."""
    captured: dict[str, torch.Tensor] = {}

    def capture(prefix: str, optimizer: ShardedOptimizer, **_: float) -> None:
        for slot in optimizer._slots:
            assert slot.grad is not None, slot.name
            captured[f"{prefix}{slot.name}"] = whole(sharded_like(slot.param, slot.grad))
        optimizer.zero_grad()

    with contextlib.ExitStack() as patches:
        for prefix, optimizer in learner._optimizers.items():
            patches.enter_context(mock.patch.object(optimizer, "step", functools.partial(capture, prefix, optimizer)))
        learner.train_step(micro_batches, step=step, **rewards)
    return captured


def assert_gradients(got: Mapping[str, torch.Tensor], expected: Mapping[str, Any], *, tolerance: float) -> None:
    """Of every parameter that `expected` names, relative to the largest of its gradient."""
    assert expected
    for name, gradient in expected.items():
        assert gradient is not None, name
        scale = gradient.abs().max()
        torch.testing.assert_close(got[name] / scale, gradient / scale, rtol=tolerance, atol=tolerance)


def assert_close(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, rtol: float) -> None:
    """The norm of every difference, relative to that of what is expected."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (got[name] - tensor).norm() / tensor.norm().clamp_min(1e-6)
        assert error <= rtol, f"{name}: {error}"


@contextlib.contextmanager
def held_writes() -> Iterator[threading.Event]:
    """No checkpoint is written before the event is set."""
    may_write, write = threading.Event(), checkpoint.save
    with mock.patch.object(checkpoint, "save", lambda *given, **keys: may_write.wait() and write(*given, **keys)):
        yield may_write


def with_lora(cfg: RunConfig, **lora: Any) -> RunConfig:
    values = {"rank": 8, "alpha": 20.0, "target_modules": "q_proj+up_proj", **lora}
    return replace(cfg, model=replace(cfg.model, lora=LoraConfig(**values)))


def reference_logprobs(learner: PolicyTrainer, batch: MicroBatch) -> np.ndarray:
    """Of the learner's reference, which it must have: float32[T]."""
    assert learner._reference is not None
    return learner._reference.logprobs([batch])[0]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, gathered if it is sharded. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(learner: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: whole(param) for name, param in learner.model.named_parameters()}


class RankPool:
    """`world_size` processes with a process group, which run one job after the other: their start costs most."""

    def __init__(self, directory: Path, *, world_size: int) -> None:
        context = forks(*RANKS)
        self._directory, self._num_jobs = directory, 0
        self._queues = [context.SimpleQueue() for _ in range(world_size)]
        self._ranks = mp.start_processes(
            _rank_main, (world_size, self._queues, directory), nprocs=world_size, join=False, start_method="forkserver"
        )

    def run(self, job: Callable[[Path], Any], directory: Path) -> list[Any]:
        """What `job(directory)` returns on each rank.

        Raises:
            TimeoutError: they hang, say in a collective that one of them never entered. They are killed.
        """
        self._num_jobs += 1
        for queue in self._queues:
            queue.put((job, directory, self._num_jobs))
        paths = [self._directory / f"result_{self._num_jobs}_{rank}.pt" for rank in range(len(self._queues))]
        give_up = time.monotonic() + PATIENT_S
        while not all(path.exists() for path in paths):
            self._ranks.join(timeout=0.1)  # raises what a rank raised
            if time.monotonic() > give_up:
                self.kill()
                raise TimeoutError(f"{len(paths)} ranks were not done after {PATIENT_S} s")
        return [torch.load(path, weights_only=False) for path in paths]

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        give_up = time.monotonic() + PATIENT_S
        while not self._ranks.join(timeout=1.0):
            if time.monotonic() > give_up:
                self.kill()

    def kill(self) -> None:
        for process in self._ranks.processes:
            process.kill()


def run_ranks(job: Callable[[Path], Any], directory: Path, *, world_size: int) -> list[Any]:
    """`RankPool.run` in new processes."""
    pool = RankPool(directory, world_size=world_size)
    found = pool.run(job, directory)
    pool.close()
    return found


def _rank_main(rank: int, world_size: int, queues: Sequence[Any], directory: Path) -> None:
    with process_group(directory / "store", rank=rank, world_size=world_size):
        while (given := queues[rank].get()) is not None:
            job, where, number = given
            path = directory / f"result_{number}_{rank}.pt"
            torch.save(job(where), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
    # The work is done and the group is gone. torch's own teardown at exit sometimes aborts the process over a thread.
    os._exit(0)
