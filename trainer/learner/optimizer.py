"""The optimizer of one rank over its shards, learning rates, and what a checkpoint holds of it.

Everything is element by element, but for Muon, which needs whole matrices. So state of any kind is sharded by rows like
its parameter, and a checkpoint fits any number of ranks.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainer.errors import ModelError
from trainer.learner.fsdp import local_tensor, num_replicas, row_mesh, sharded_like
from weight_sync.publish.shards import chunk_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from trainer.config.schema import LearnerConfig

BLOCK, MIN_BLOCK, MIN_QUANTIZED = 256, 32, 4096
"""8-bit moments have one scale per block of a row (Dettmers et al. 2021, arXiv:2110.02861); parameters with fewer
numbers, or rows that no such block divides, have float32 moments."""
MUON_MOMENTUM = 0.95
MUON_RMS = 0.2
"""Root mean square of an update that Muon's is scaled to, that of AdamW, so that both take one learning rate and decay
(Liu et al. 2025, arXiv:2502.16982, section 2.2)."""


def learning_rate(step: int, *, config: LearnerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (counted from 0): linear warm-up (of 4 steps: 0.25, 0.5, 0.75, 1.0 times
    `lr`), then the schedule down to the last step. A pure function, so a resumed run needs no scheduler state."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    begin = config.warmup_steps
    if config.lr_schedule == "wsd":
        begin = max(begin, total_steps - wsd_decay_steps(config, total_steps=total_steps))
    progress = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
    match config.lr_schedule:
        case "constant":
            return config.lr
        case "linear" | "wsd":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"learner.lr_schedule must be constant, cosine, linear or wsd, got {config.lr_schedule!r}")
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def wsd_decay_steps(config: LearnerConfig, *, total_steps: int) -> int:
    """`learner.decay_steps`, or a tenth of all steps."""
    return max(1, total_steps // 10) if config.decay_steps is None else config.decay_steps


@dataclass(slots=True, kw_only=True)
class Slot:
    """One parameter as the model and as the optimizer see it; both share memory."""

    name: str
    param: nn.Parameter
    local: Tensor
    lr_ratio: float
    weight_decay: float
    is_muon: bool
    state: dict[str, Any] = field(default_factory=dict)
    """Of the shape of `local`."""
    block: int = 0
    """Numbers that share a scale in an 8-bit state; 0 without one."""
    sum: Tensor | None = None
    """Gradients so far, float32, of a bfloat16 parameter: FSDP2 would add them up in bfloat16."""

    @property
    def grad(self) -> Tensor | None:
        """This rank's shard, float32."""
        if self.param.dtype == torch.bfloat16:
            return self.sum
        return None if self.param.grad is None else local_tensor(self.param.grad)

    def drop_grad(self) -> None:
        self.sum = self.local.grad = self.param.grad = None

    def add_grad(self, param: Tensor) -> None:
        """FSDP2 calls this after each reduction of the gradient."""
        assert param.grad is not None
        grad = local_tensor(param.grad)
        self.sum = grad.float() if self.sum is None else self.sum.add_(grad)
        param.grad = None


class ShardedOptimizer:
    """What `learner.optimizer` and `learner.master_dtype` name: AdamW (Loshchilov and Hutter 2019), with moments in
    float32, bfloat16 or 8 bits, or Muon for the matrices of blocks and AdamW for the rest.

    Weights and moments in bfloat16 are rounded stochastically, or updates below 1/256 of a number would be lost. The
    draws follow from the seed, the number of updates and the shard, so a resumed run makes the same ones.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        config: LearnerConfig,
        seed: int = 0,
        matrices: Iterable[str] = (),
    ) -> None:
        """`params` by the names that they have in checkpoints; all of them are trained. `matrices` are those that Muon
        may move. Raises ModelError if a pattern of `learner.param_groups` fits none, or torchao is missing."""
        self._config, self._seed, self._num_updates = config, seed, 0
        whole = set(matrices) if config.optimizer == "muon" else set[str]()
        options = _group_options(params, config)
        self._slots = [
            Slot(
                name=name,
                param=param,
                local=local_tensor(param.detach()).requires_grad_(),
                lr_ratio=options[name].lr_ratio,
                weight_decay=options[name].weight_decay,
                is_muon=name in whole,
            )
            for name, param in params.items()
        ]
        for slot in self._slots:  # allocated at once: a checkpoint is loaded into these tensors
            if config.optimizer == "adamw_8bit":
                slot.block = quantized_block(tuple(slot.param.shape))
            slot.state = _new_state(slot, config.optimizer)
            if slot.param.dtype == torch.bfloat16:
                slot.param.register_post_accumulate_grad_hook(slot.add_grad)
        self._adamw = [slot for slot in self._slots if not slot.is_muon]
        # Matrices whose turns come together take about the same time.
        self._muon = sorted((slot for slot in self._slots if slot.is_muon), key=lambda slot: slot.param.numel())
        self._fused = None
        if self._adamw and all(_is_plain(slot) for slot in self._adamw):
            self._fused = _fused_adamw(self._adamw, config)

    def grad_sq_sum(self) -> Tensor:
        """Sum of squares over this rank's shards, float32[], on the gradients' device; of a shard that several ranks
        hold their part of it, so that the sum over all ranks is that of the whole gradient."""
        by_replicas: dict[int, list[Tensor]] = {}
        for slot in self._slots:
            if (grad := slot.grad) is not None:
                by_replicas.setdefault(num_replicas(slot.param), []).append(grad)
        return sum((get_total_norm(g).square() / n for n, g in by_replicas.items()), torch.zeros(()))

    @torch.no_grad()
    def step(self, *, lr: float, grad_norm: float) -> None:
        """Clip to `max_grad_norm` by the given norm of the whole gradient, update, and drop the gradients. Collective
        with Muon."""
        grads = {slot.name: slot.grad for slot in self._slots}
        if grad_norm > self._config.max_grad_norm:
            found = [grad for grad in grads.values() if grad is not None]
            share = (self._config.max_grad_norm / (torch.tensor(grad_norm) + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(found, share.to(found[0].device))  # pyright: ignore[reportPrivateImportUsage]
        self._num_updates += 1
        draws = any(one.dtype == torch.bfloat16 for slot in self._slots for one in (slot.local, *slot.state.values()))
        seed = self._seed * 1_000_003 + self._num_updates
        with _seeded(self._slots[0], seed) if draws else contextlib.nullcontext():
            if self._fused is not None:
                for slot in self._adamw:
                    slot.local.grad = grads[slot.name]
                for group in self._fused.param_groups:
                    group["lr"] = lr * group["lr_ratio"]
                self._fused.step()
            else:
                _adamw_step(self._adamw, grads, lr=lr, config=self._config, count=self._num_updates)
            _muon_step(self._muon, grads, lr=lr)
        self.zero_grad()

    def zero_grad(self) -> None:
        for slot in self._slots:
            slot.drop_grad()

    def weights(self) -> dict[str, Tensor]:
        """What is trained, by parameter name, for checkpoints."""
        return {slot.name: slot.param.detach() for slot in self._slots}

    def state(self) -> dict[str, Tensor]:
        """Moments by kind and parameter name, as (D)Tensors that share memory with the optimizer, for checkpoints."""
        return {
            f"{key}.{slot.name}": sharded_like(slot.param, part)
            for slot in self._slots
            for kind, tensor in slot.state.items()
            for key, part in _parts(kind, tensor, slot.block).items()
        }

    @property
    def num_updates(self) -> int:
        """Updates made so far, the same for every parameter."""
        return self._num_updates

    def set_num_updates(self, count: int) -> None:
        """Of a loaded checkpoint: Adam's bias correction depends on it."""
        self._num_updates = count
        if self._fused is not None:
            for slot in self._adamw:
                self._fused.state[slot.local]["step"].fill_(count)


class _Options(NamedTuple):
    lr_ratio: float
    weight_decay: float


def _group_options(params: Mapping[str, nn.Parameter], config: LearnerConfig) -> dict[str, _Options]:
    """By name: the first group of `learner.param_groups` that fits, else decay on matrices only."""
    found = {name: _Options(1.0, config.weight_decay if param.ndim >= 2 else 0.0) for name, param in params.items()}
    for key, group in reversed(config.param_groups.items()):
        names = fnmatch.filter(params, group.pattern)
        if not names:
            raise ModelError(
                f"learner.param_groups.{key}.pattern {group.pattern!r} fits none of the {len(params)} trained "
                f"parameters, such as {', '.join(list(params)[:3])}; correct it (* stands for any text), or leave the "
                "group out"
            )
        for name in names:
            decay = found[name].weight_decay if group.weight_decay is None else group.weight_decay
            found[name] = _Options(group.lr_ratio, decay)
    return found


def muon_matrices(hf: PreTrainedModel, names: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of what Muon moves: matrices, and stacks of them (fused experts), but neither embeddings nor the output
    matrix, whose rows are tokens, nor a value head."""
    head = hf.get_output_embeddings()
    tables = [module.weight for module in hf.modules() if isinstance(module, nn.Embedding)]
    others = {id(table) for table in [*tables, getattr(head, "weight", None)]}
    return [name for name, param in names.items() if param.ndim >= 2 and param.shape[0] > 1 and id(param) not in others]


def _is_plain(slot: Slot) -> bool:
    """Whether torch's fused AdamW can move it."""
    return not slot.block and all(one.dtype == torch.float32 for one in (slot.local, *slot.state.values()))


def _fused_adamw(slots: Sequence[Slot], config: LearnerConfig) -> torch.optim.AdamW:
    groups: dict[_Options, list[Tensor]] = {}
    for slot in slots:
        groups.setdefault(_Options(slot.lr_ratio, slot.weight_decay), []).append(slot.local)
    fused = torch.optim.AdamW(
        [{"params": params, **options._asdict()} for options, params in groups.items()],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for slot in slots:
        steps = torch.zeros((), dtype=torch.float32, device=slot.local.device)
        fused.state[slot.local] = {"step": steps, **slot.state}
    return fused


# --- state ---


def _new_state(slot: Slot, optimizer: str) -> dict[str, Tensor]:
    local = slot.local
    if slot.is_muon:
        return {"momentum": torch.zeros_like(local, dtype=torch.float32)}
    if slot.block:
        new = _optim_state_8bit().zeros if local.numel() else _no_rows
        return {
            "exp_avg": new(local.shape, True, slot.block, local.device, dtype=torch.float32),
            "exp_avg_sq": new(local.shape, False, slot.block, local.device, dtype=torch.float32),
        }
    dtype = torch.bfloat16 if optimizer == "adamw_bf16" else torch.float32
    return {kind: torch.zeros_like(local, dtype=dtype, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}


def quantized_block(shape: tuple[int, ...]) -> int:
    """Numbers that share a scale: they divide a row, so that a row is never cut. 0: moments in float32. It depends on
    the whole parameter, so that it is the same for any number of ranks."""
    row = math.prod(shape[1:])
    block = next((size for size in range(min(BLOCK, row), MIN_BLOCK - 1, -1) if row % size == 0), 0)
    return block if len(shape) > 1 and math.prod(shape) >= MIN_QUANTIZED else 0


def _no_rows(shape: torch.Size, *_: object, **__: object) -> Tensor:
    """Codes of a rank without a row of the parameter, of which torchao's type cannot be."""
    return torch.empty(shape, dtype=torch.uint8)


def _optim_state_8bit() -> Any:
    try:
        return importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
    except ImportError as error:
        raise ModelError(
            f"learner.optimizer=adamw_8bit needs torchao, which cannot be imported ({error}); pip install torchao, or "
            "use adamw_bf16"
        ) from error


def _parts(kind: str, tensor: Any, block: int) -> dict[str, Tensor]:
    """The tensors of a state by name. Of 8 bits: codes, and scales by row."""
    if not block:
        return {kind: tensor}
    codes = tensor.codes if tensor.numel() else tensor
    scales = tensor.scale if tensor.numel() else tensor.new_empty(0, dtype=torch.float32)
    return {f"{kind}_codes": codes, f"{kind}_scales": scales.view(codes.shape[0], math.prod(codes.shape[1:]) // block)}


# --- AdamW in other types ---


@contextlib.contextmanager
def _seeded(slot: Slot, seed: int) -> Iterator[None]:
    """The default generator, the only one that compiled code draws from, is seeded inside and is afterwards as it was.
    Replicas of a shard draw the same."""
    device, mesh = slot.local.device, row_mesh(slot.param)
    shard = 0 if mesh is None else mesh.get_local_rank()
    of_device: dict[str, Any] = {} if device.type == "cpu" else {"device_type": device.type}
    with torch.random.fork_rng([device] if of_device else [], **of_device):
        torch.manual_seed((seed * 1_000_003 + shard) % 2**63)
        yield


def _adamw_step(
    slots: Sequence[Slot], grads: Mapping[str, Tensor | None], *, lr: float, config: LearnerConfig, count: int
) -> None:
    device = slots[0].local.device
    # Compiled, or the temporary float32 copies of an embedding would need gigabytes; once for each shape.
    update = _update if device.type == "cpu" else torch.compile(_update, fullgraph=True, dynamic=False)
    steps = [lr * slot.lr_ratio for slot in slots]
    keep = [1.0 - step * slot.weight_decay for step, slot in zip(steps, slots, strict=True)]
    size = [step / (1.0 - config.beta1**count) for step in steps]
    scales = torch.tensor([keep, size], device=device)  # tensors, since compiled code holds numbers as constants
    shrink = torch.tensor((1.0 - config.beta2**count) ** -0.5, device=device)
    with torch._dynamo.config.patch(recompile_limit=len(slots) + 8):
        for index, slot in enumerate(slots):
            grad = grads[slot.name]
            if grad is None or not grad.numel():
                continue
            first, second = slot.state["exp_avg"], slot.state["exp_avg_sq"]
            options = (config.beta1, config.beta2, config.eps)
            update(slot.local.detach(), grad, first, second, scales[0, index], scales[1, index], shrink, options)


def _update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    keep: Tensor,
    size: Tensor,
    shrink: Tensor,
    options: tuple[float, float, float],
) -> None:
    """AdamW in float32: `keep` is 1 - decay, `size` the step over its bias correction, `shrink` that of the root."""
    beta1, beta2, eps = options
    first = exp_avg.float().lerp(grad, 1.0 - beta1)
    second = exp_avg_sq.float().lerp(grad.square(), 1.0 - beta2)
    _store(exp_avg, first)
    _store(exp_avg_sq, second)
    _store(param, param.float() * keep - size * first / (second.sqrt() * shrink + eps))


def _store(target: Tensor, value: Tensor) -> None:
    target.copy_(_rounded(value) if target.dtype == torch.bfloat16 else value)


def _rounded(value: Tensor) -> Tensor:
    """float32 to bfloat16, up or down at random, so that the mean is the value: a draw is added to the 16 bits that go
    (Gupta et al. 2015, arXiv:1502.02551)."""
    draw = torch.randint_like(value, 1 << 16, dtype=torch.int32)
    return ((value.view(torch.int32) + draw) & -(1 << 16)).view(torch.float32).bfloat16()


# --- Muon ---


def _muon_step(slots: Sequence[Slot], grads: Mapping[str, Tensor | None], *, lr: float) -> None:
    """Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, as torch.optim.Muon computes it. Ranks take turns:
    each makes one of as many matrices as there are ranks orthogonal, of which the others send it their rows."""
    mesh = row_mesh(slots[0].param) if slots else None
    at_once = 1 if mesh is None else mesh.size()
    matrices = [slot for slot in slots if slot.param.ndim == 2]
    batches = [matrices[begin : begin + at_once] for begin in range(0, len(matrices), at_once)]
    for batch in batches + [[slot] for slot in slots if slot.param.ndim > 2]:
        nesterov = [_momentum(slot, grads[slot.name]) for slot in batch]
        for slot, direction in zip(batch, _orthogonal_rows(batch, nesterov, mesh), strict=True):
            step = lr * slot.lr_ratio
            moved = slot.local.float() * (1.0 - step * slot.weight_decay)
            scale = MUON_RMS * math.sqrt(max(slot.param.shape[-2:]))
            _store(slot.local.detach(), moved.add_(direction, alpha=-step * scale))


def _momentum(slot: Slot, grad: Tensor | None) -> Tensor:
    momentum = slot.state["momentum"]
    grad = torch.zeros_like(momentum) if grad is None else grad
    return grad.lerp(momentum.lerp_(grad, 1.0 - MUON_MOMENTUM), MUON_MOMENTUM).bfloat16()


def _orthogonal_rows(slots: Sequence[Slot], rows: Sequence[Tensor], mesh: DeviceMesh | None) -> list[Tensor]:
    """Own rows of the orthogonal matrices nearest to those whose rows are given. Experts are whole on a rank."""
    if mesh is None or mesh.size() == 1 or slots[0].param.ndim > 2:
        return [_orthogonal(one) for one in rows]
    ranks, own = mesh.size(), mesh.get_local_rank()
    sent = [one.numel() for one in rows] + [0] * (ranks - len(rows))
    shape = slots[own].param.shape if own < len(slots) else torch.Size((0, 0))
    received = [
        (stop - start) * shape[1] for start, stop in (chunk_rows(shape[0], ranks, rank) for rank in range(ranks))
    ]
    whole = _all_to_all(torch.cat([one.flatten() for one in rows]), sent, received, mesh).view(shape)
    back = _all_to_all(_orthogonal(whole).flatten() if whole.numel() else whole.flatten(), received, sent, mesh)
    return [part.view_as(one) for part, one in zip(back.split(sent), rows, strict=False)]


def _all_to_all(sent_N: Tensor, sent: Sequence[int], received: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """bfloat16[N], as bytes, since gloo has no such type."""
    into = sent_N.new_empty(2 * sum(received), dtype=torch.uint8)
    sizes = ([2 * count for count in received], [2 * count for count in sent])
    dist.all_to_all_single(into, sent_N.contiguous().view(torch.uint8), *sizes, group=mesh.get_group())
    return into.view(torch.bfloat16)


def _orthogonal(matrix: Tensor) -> Tensor:
    if matrix.ndim > 2:
        return torch.stack([_orthogonal(one) for one in matrix]) if len(matrix) else matrix
    # Not public, and so imported only where it is needed.
    from torch.optim._muon import (
        DEFAULT_A,
        DEFAULT_B,
        DEFAULT_C,
        DEFAULT_NS_STEPS,
        EPS,
        _zeropower_via_newtonschulz,
    )

    return _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)
