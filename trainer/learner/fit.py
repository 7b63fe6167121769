"""How many tokens a micro-batch may have, found and tried before the first step."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from trainer.config.algorithm import loss_traits
from trainer.config.rules import SIZES_OF_CACHE, longest_sequence, longest_slice
from trainer.data.batch import MicroBatch
from trainer.errors import LearnerError
from trainer.learner.offload import take_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config.schema import RunConfig
    from trainer.learner.policy import PolicyTrainer
    from weight_sync.device.base import Backend


KEY = "learner.max_tokens_per_micro_batch"
TOKENS_ON_CPU = 16384
MOST_TOKENS = 65536
"""More make no matrix product faster, and a tensor of them may have more elements than 32 bits can count."""
USABLE_SHARE, USABLE_SHARE_BESIDE_ENGINE = 0.92, 0.85
"""Of a device, by torch and by the arenas of weight sync: the rest is for contexts, communication, and what torch's
allocator cannot join; beside an engine that sleeps, also for what it keeps. A share of what the device has, not of what
happens to be free: two runs of one configuration must choose the same number."""
BESIDE_ENGINE = "lower rollout.gpu_memory_utilization, or use mode.offload=auto"
ENOUGH_TOKENS = 32768
"""Of a micro-batch: for more the learner does not leave its device to the engine and come back in every step."""
SMALL = (2048, 4096)
"""Tokens of the two micro-batches from which memory per token is measured."""

log = logging.getLogger(__name__)


class Fit(NamedTuple):
    tokens: int
    """Of a micro-batch, at most."""
    stays_on_device: bool
    """The learner's memory need not leave its device."""


def on_grid(num_tokens: float) -> int:
    """The largest of 1, 1.5, 2, 3, 4, 6, 8, ... that is no larger; measurements that differ a little give the same."""
    power = 2 ** math.floor(math.log2(max(1.0, num_tokens)))
    return power * 3 // 2 if power >= 2 and num_tokens >= power * 1.5 else power


def usable_bytes(cfg: RunConfig, total_bytes: int) -> int:
    """Of a learner's device."""
    return int(total_bytes * (USABLE_SHARE_BESIDE_ENGINE if cfg.mode.shares_devices else USABLE_SHARE))


def usable_beside_engine(cfg: RunConfig, total_bytes: int) -> int | None:
    """Of a device whose engine keeps its own share; None where the learner leaves, or has the device to itself."""
    mode, rollout = cfg.mode, cfg.rollout
    if not mode.shares_devices or mode.offload == "always":
        return None
    if mode.offload == "auto" and any(name in rollout.engine_args for name in SIZES_OF_CACHE):
        return None
    return int(total_bytes * (USABLE_SHARE_BESIDE_ENGINE - rollout.gpu_memory_utilization))


def choose(cfg: RunConfig, most: float, most_beside: float | None, *, earlier: int | None = None) -> Fit:
    """What `learner.max_tokens_per_micro_batch=auto` becomes: never less than the longest sequence.

    Args:
        most: tokens that there is room for on a device that the learner has to itself, or while the engine sleeps.
        most_beside: beside an engine that is awake; None if the learner leaves in any case.
        earlier: what the run had before it was resumed, which stays if it fits.
    """
    longest = longest_slice(cfg)
    keeps = earlier is not None and earlier <= max(most, longest)
    tokens = earlier if earlier is not None and keeps else max(longest, min(MOST_TOKENS, on_grid(most)))
    if most_beside is None:
        return Fit(tokens, stays_on_device=not cfg.mode.shares_devices)
    beside = tokens if tokens <= most_beside else min(MOST_TOKENS, on_grid(most_beside))
    if cfg.mode.offload == "never":
        return Fit(max(longest, beside), stays_on_device=True)
    enough = tokens if keeps else max(longest, min(tokens, ENOUGH_TOKENS))
    return Fit(beside, stays_on_device=True) if beside >= enough else Fit(tokens, stays_on_device=False)


def fit_micro_batch(
    learner: PolicyTrainer, cfg: RunConfig, backend: Backend, *, arena_bytes: int, earlier: int | None
) -> Fit:
    """The same on every rank; tried in one rehearsal, except on a CPU that compiles nothing. Collective.

    Args:
        arena_bytes: what weight sync will take of the device beside torch.
        earlier: tokens per micro-batch before the run was resumed, which `auto` keeps if they fit.

    Raises:
        LearnerError: it does not fit.
    """
    asked, longest = cfg.learner.max_tokens_per_micro_batch, longest_slice(cfg)

    def rehearse(num_tokens: int) -> None:
        of_all = num_tokens * cfg.learner.context_parallel_size
        shares_prefix = learner.layout.shares_prefix and cfg.learner.share_prefix is not False
        learner.rehearse(largest_micro_batch(cfg, of_all, shares_prefix=shares_prefix))

    if backend.torch_device == "cpu":
        tokens = max(longest, TOKENS_ON_CPU) if asked == "auto" else asked
        if cfg.learner.compile is True:
            rehearse(tokens)
        return Fit(tokens, stays_on_device=not cfg.mode.shares_devices or cfg.mode.offload == "never")

    def peak_bytes(num_tokens: int) -> int:
        memory = torch.get_device_module(backend.torch_device)
        memory.reset_peak_memory_stats()
        rehearse(num_tokens)
        return memory.max_memory_allocated()

    total = backend.memory_info()[1]
    beside = usable_beside_engine(cfg, total)
    beside = None if beside is None else beside - arena_bytes
    if asked != "auto":
        peaks: list[int] = []
        if not _is_room(lambda: peaks.append(peak_bytes(asked)), backend):
            raise _too_large(asked, "lower it")
        stays = beside is not None and _least_of_ranks(beside - peaks[0]) >= 0
        if cfg.mode.offload == "never" and beside is not None and not stays:
            raise _too_large(asked, f"lower it, or {BESIDE_ENGINE}")
        return Fit(asked, stays_on_device=stays or not cfg.mode.shares_devices)
    return fitting_tokens(
        peak_bytes,
        can_take=lambda num_bytes: _fits_here(lambda: take_block(backend, num_bytes), backend),
        limit_bytes=usable_bytes(cfg, total) - arena_bytes,
        beside_bytes=beside,
        cfg=cfg,
        earlier=earlier,
        is_room=lambda one: _is_room(one, backend),
    )


def fitting_tokens(
    peak_bytes: Callable[[int], int],
    *,
    can_take: Callable[[int], bool],
    limit_bytes: int,
    beside_bytes: int | None,
    cfg: RunConfig,
    earlier: int | None,
    is_room: Callable[[Callable[[], object]], bool],
) -> Fit:
    """What `auto` becomes on an accelerator. Memory grows with the tokens along a line, which two small micro-batches
    show. What was chosen is halved, once, where that memory cannot be taken on every rank, and rehearsed in it.

    Args:
        peak_bytes: rehearses a step of so many tokens; the most that it took. Collective.
        can_take: has torch cache so many bytes of this rank's device, if there are as many. Not collective, so that
            ranks can agree on a failure: in the middle of a rehearsal, others wait for the one that fails.
        limit_bytes, beside_bytes: of the device, see `choose`.
        is_room: whether what it calls ended without an error about memory.
    """
    peaks: list[int] = []
    if not is_room(lambda: peaks.extend(map(peak_bytes, SMALL))):
        raise _too_large(SMALL[1], "use more learner.num_ranks")
    per_token, longest = max(1.0, (peaks[1] - peaks[0]) / (SMALL[1] - SMALL[0])), longest_slice(cfg)

    def room(num_bytes: int) -> float:
        return _least_of_ranks(SMALL[0] + (num_bytes - peaks[0]) / per_token)

    most_beside = None if beside_bytes is None else room(beside_bytes)
    tokens, stays = choose(cfg, room(limit_bytes), most_beside, earlier=earlier)
    if most_beside is not None and stays and tokens > most_beside:
        raise _too_large(tokens, BESIDE_ENGINE)
    if earlier not in (None, tokens):
        text = "%s was %d before, which no longer fits; it is %d now, and steps differ by rounding"
        log.warning(text, KEY, earlier, tokens)

    def fits(num_tokens: int) -> bool:
        needed = int(peaks[0] + per_token * (num_tokens - SMALL[0]))
        return _least_of_ranks(can_take(needed)) > 0 and is_room(lambda: peak_bytes(num_tokens))

    if not fits(tokens):
        too_many, tokens = tokens, max(longest, tokens // 2)
        if tokens < too_many:
            log.warning("%s=auto: %d tokens did not fit on the device of a rank; it is %d now", KEY, too_many, tokens)
        if tokens == too_many or not fits(tokens):
            raise _too_large(tokens, "set it, down to the longest sequence, or use more learner.num_ranks")
    return Fit(tokens, stays)


def _too_large(num_tokens: int, do: str) -> LearnerError:
    return LearnerError(
        f"a micro-batch of {num_tokens} tokens ({KEY}) does not fit on the learner's device; {do}, or set "
        "learner.activation_checkpointing=true; python -m trainer --dry-run shows what takes the memory"
    )


def _is_room(action: Callable[[], object], backend: Backend) -> bool:
    """Raises LearnerError where other ranks would wait for this one."""
    if dist.get_world_size() == 1:
        return _fits_here(action, backend)
    try:
        action()
    except torch.OutOfMemoryError as error:  # the others may be inside a collective
        raise LearnerError(
            f"the rehearsal of a step did not fit on this rank's device ({error}); lower {KEY}"
        ) from error
    return True


def _fits_here(action: Callable[[], object], backend: Backend) -> bool:
    try:
        action()
    except torch.OutOfMemoryError:
        pass
    else:
        return True
    backend.release_cached()  # outside: the error holds what was computed
    return False


def _least_of_ranks(value: float) -> float:
    least = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.item()


def largest_micro_batch(cfg: RunConfig, max_tokens: int, *, shares_prefix: bool = False) -> MicroBatch:
    """As large as one can be: sequences of the longest prompt and response, the last one (or the only one) cut to what
    is left. Its loss is 0. With `shares_prefix` all have one prompt, and its keys take memory for each of them."""
    longest = min(longest_sequence(cfg), max_tokens)
    prompt = cfg.task.max_prompt_tokens * longest // longest_sequence(cfg)
    prefix, shortest = (prompt, 1) if shares_prefix else (0, 2)  # tokens: one to predict, and one to predict it from
    num_whole, rest = divmod(max_tokens - longest, longest - prefix)
    own = [longest, *[longest - prefix] * num_whole, *([rest] if rest >= shortest else [])]
    lengths = np.array(own) + np.where(np.arange(len(own)) > 0, prefix, 0)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = int(bounds[-1])
    mask = np.arange(num_tokens) - np.repeat(bounds[:-1], lengths) >= prompt
    mask[-1] = True  # the sequence that is cut has a loss token, too
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        cu_seqlens=bounds.astype(np.int32),
        token_ids=np.zeros(num_tokens, np.int32),
        loss_mask=mask,
        behavior_logprobs=zeros,
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=zeros,
        loss_weights=zeros,
        cov_selected=np.zeros(num_tokens, np.bool_) if loss_traits(cfg.algorithm.loss).selects else None,
        prefix_lens=(lengths - own).astype(np.int32) if shares_prefix else None,
    )
