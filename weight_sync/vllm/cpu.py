"""vLLM on CPU: plain weights that a sync can write, products whose rows are independent, and seeded requests."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PADDED_ROWS = 16
"""Matrix products get at least so many rows; see `_make_rows_independent`."""


def keep_weights_addressable() -> bool:
    """Stop vLLM's CPU build from packing weights away. Must run before the model is loaded. True if it acted.

    On CPU, `dispatch_cpu_unquantized_gemm` hands each linear weight to oneDNN or (small, with AMX) to an SGL kernel
    in a packed layout, and leaves `weight` as an empty tensor: there is nothing left to write new weights into. Without
    both it falls back to `torch.nn.functional.linear` on the plain weight. Experts are repacked likewise, under their
    old names and shapes; see `_keep_experts_plain`. Can go when vLLM has a switch for this.
    """
    if not import_module("vllm.platforms").current_platform.is_cpu():
        return False
    ops: Any = import_module("vllm._custom_ops")
    ops._supports_onednn = False
    layers: Any = import_module("vllm.model_executor.layers.utils")
    if hasattr(layers, "_CPU_SGL_GEMM_MAX_WEIGHT_BYTES"):
        layers._CPU_SGL_GEMM_MAX_WEIGHT_BYTES = 0
    _make_rows_independent(layers)
    _keep_experts_plain()
    rewind_generators()
    return True


def _make_rows_independent(layers: Any) -> None:
    """Give every row of a CPU matrix product the same bits whatever else is in the batch.

    With plain (unpacked) weights MKL computes products of 1-3 rows by another kernel than larger ones; from 4 rows on,
    a row's bits do not depend on its neighbours (seen with one thread). So small products are padded. Without this a
    seeded request would repeat its tokens but not the last bits of its log-probs, and a synchronous run not itself.
    """
    original = layers.cpu_unquantized_gemm
    if hasattr(original, "pads_rows"):
        return

    def padded(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        rows = x.shape[0]
        if x.dim() != 2 or rows >= PADDED_ROWS:
            return original(layer, x, weight, bias)
        pad = import_module("torch.nn.functional").pad
        return original(layer, pad(x, (0, 0, 0, PADDED_ROWS - rows)), weight, bias)[:rows]

    padded.pads_rows = True  # pyright: ignore[reportFunctionMemberAccess] - so that a second call does nothing
    layers.cpu_unquantized_gemm = padded


def _keep_experts_plain() -> None:
    """Let the CPU's unquantised experts work on weights in the order of the checkpoint.

    Their grouped matrix product wants a permuted copy, which vLLM (0.32) registers under the old name and with the old
    shape: new weights would be written into it in the wrong order, and nothing would tell.
    """
    try:
        experts: Any = import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    except ModuleNotFoundError:  # before 0.32; `compat.rearranged_experts` tells if it matters
        return
    experts.process_weights_after_loading = _leave_as_loaded
    experts.apply = _apply_plain_experts


def _leave_as_loaded(experts: Any, layer: Any) -> None:
    """In place of `CPUUnquantizedExperts.process_weights_after_loading`."""
    del experts
    layer.keeps_checkpoint_order = True


def _apply_plain_experts(
    experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, **how: Any
) -> None:
    """In place of `CPUUnquantizedExperts.apply`: one expert after another, summed in float32 in order of expert."""
    torch: Any = import_module("torch")
    activate = import_module("vllm.model_executor.layers.fused_moe.activation").apply_moe_activation
    expert_map = how["expert_map"]
    total = torch.zeros(output.shape, dtype=torch.float32)
    ids = topk_ids if expert_map is None else expert_map[topk_ids]
    for expert in torch.unique(ids).tolist():
        if expert < 0:  # lives on another rank
            continue
        rows, choice = torch.where(ids == expert)
        biases = [None if bias is None else bias[expert] for bias in (experts.w1_bias, experts.w2_bias)]
        gate_up = _padded_linear(hidden_states[rows], w1[expert], biases[0])
        inner = torch.empty(len(rows), w2.shape[2], dtype=gate_up.dtype)
        activate(how["activation"], inner, gate_up)
        part = _padded_linear(inner, w2[expert], biases[1]).float()
        if not how["apply_router_weight_on_input"]:
            part *= topk_weights[rows, choice].unsqueeze(1).float()
        total.index_add_(0, rows, part)
    output.copy_(total)


def _padded_linear(x: Any, weight: Any, bias: Any) -> Any:
    """`x @ weight.T + bias` with at least `PADDED_ROWS` rows, for the reason given in `_make_rows_independent`."""
    functional: Any = import_module("torch.nn.functional")
    missing = max(0, PADDED_ROWS - x.shape[0])
    return functional.linear(functional.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]


def rewind_generators() -> None:
    """Repair the CPU model runner of this process. Idempotent.

    After a part of a prompt that is not its last, vLLM samples a token, throws it away and turns the request's random
    generator back by an offset, which only device generators have: the engine ends with "CPU Generator does not use
    offset". Prompts longer than a step's budget do that, and so do requests that are computed again at a commit
    (`in_flight: recompute`). Here the state is kept before sampling and put back. Can go when vLLM does so itself,
    which 0.32 does not.
    """
    runner: Any = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    if hasattr(runner._sample, "rewinds"):
        return
    sample, book = runner._sample, runner._bookkeeping_sync

    def sample_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = [(generator, generator.get_state()) for generator in _discarded(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in kept:
            generator.set_state(state)
        return output

    def book_without_rewinding(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, hidden = self.input_batch.generators, _discarded(self)
        for index in hidden:
            del generators[index]
        try:
            return book(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    sample_and_rewind.rewinds = True  # pyright: ignore[reportFunctionMemberAccess] - so that a second call does nothing
    runner._sample, runner._bookkeeping_sync = sample_and_rewind, book_without_rewinding


def _discarded(runner: Any) -> dict[int, Any]:
    """Row -> generator, of the rows whose sampled token does not count."""
    batch = runner.input_batch
    rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    return {row: batch.generators[row] for row in rows if row in batch.generators}
