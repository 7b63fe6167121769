"""Models: made without memory and checked (`meta_model`), then sharded and filled (`shard_and_load`).

Shape legend: `T` packed tokens, `L` loss tokens, `E` hidden size.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from trainer.config.schema import model_paths
from trainer.errors import TESTED, ModelError
from trainer.learner.attention import ATTENTION_NAME, Scores, best_layout, register_packed_attention
from trainer.learner.flops import head_dim
from trainer.learner.fsdp import (
    UNSHARDED_SHARE,
    ComputeWeights,
    RootModel,
    local_tensor,
    parameter_places,
    shard_model,
)
from trainer.learner.logprobs import Head, selected_logprobs
from trainer.learner.lora import add_adapters, init_adapters
from trainer.learner.packed_inputs import PackedInputs
from trainer.learner.tensor_parallel import check_divisible, divide_blocks
from trainer.learner.weights import (
    check_weights,
    checkpoint_files,
    init_weights,
    is_random_init,
    load_rows,
    own_parts,
    resolve_model_dir,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.config.schema import ModelConfig, RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.attention import LayoutFn
    from trainer.learner.parallel import ContextGroup, ParallelContext


LOGIT_TRANSFORMS = ("logits_soft_cap", "logit_scale", "logits_scaling")
"""Config fields of models that do more after the last hidden state than one matrix product, and a soft cap at most."""
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
"""Of `config.layer_types`: what reaches our attention function with all that it does. Convolutions, recurrences and
chunked or sparse attention would mix packed sequences."""
MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::_grouped_mm"}
CONFIG_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ArithmeticError, ImportError,
)  # fmt: skip
"""A damaged config fails wherever its numbers are first used."""


def load_config(model: ModelConfig, directory: Path) -> PreTrainedConfig:
    """Raises ModelError if the config cannot be read, names an architecture transformers does not know, or belongs to
    quantized weights."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        raise ModelError(
            f"{directory / 'config.json'} cannot be used: {error}; check model_type, or set "
            "model.trust_remote_code=true if the model brings its own code"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping and not getattr(config, "auto_map", None):
        raise ModelError(f"model_type {config.model_type!r} is not a causal language model; the policy must be one")
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        raise ModelError(
            f"{directory / 'config.json'} is of quantized weights (quant_method {method!r}), which mean nothing "
            "without their scales; give the model in bfloat16, float16 or float32"
        )
    return config


def check_packed(config: PreTrainedConfig, directory: Path, cfg: RunConfig) -> bool:
    """Build the model of a config without memory, and run it packed once: its shapes and its calls, no numbers. Returns
    whether the scores of its attention are plain in every block. Raises ModelError if it cannot be built, does more
    than we compute, has a block without our attention function, or cannot be divided by
    `learner.tensor_parallel_size`."""
    register_packed_attention()
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                experts_implementation="batched_mm",  # others look at numbers
                trust_remote_code=cfg.model.trust_remote_code,
            )
    except CONFIG_ERRORS as error:
        raise ModelError(
            f"{directory / 'config.json'} describes no model that can be built ({type(error).__name__}: {error}); "
            "download it again"
        ) from error
    blocks = check_architecture(hf)
    if cfg.learner.tensor_parallel_size > 1:
        check_divisible(hf, blocks, cfg.learner)
    hf.set_attn_implementation(ATTENTION_NAME)  # only then, since a class that knows no other than its own breaks
    return _run_once(hf, blocks)


def check_architecture(hf: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of a model. Raises ModelError if it does more than we compute, packed and with chunked
    log-probs."""
    name, config = type(hf).__name__, hf.config.get_text_config()
    if not hf._supports_attention_backend:
        raise ModelError(f"{name} has its own attention code, which cannot run packed; use {TESTED}")
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"{name} has output layer {head}; only a matrix without bias is supported; use {TESTED}")
    for transform in LOGIT_TRANSFORMS:
        if (value := getattr(config, transform, None)) not in (None, 1, 1.0):
            raise ModelError(f"{name} transforms its logits ({transform}={value}), which we do not; use {TESTED}")
    if foreign := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        raise ModelError(
            f"{name} has layers of type {', '.join(foreign)}, in which packed sequences would see each other; only "
            f"full and sliding attention can run packed; use {TESTED}"
        )
    _check_rotary(hf)
    blocks = getattr(hf.base_model, "layers", None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise ModelError(f"{name} has no decoder blocks at {hf.base_model_prefix}.layers; use {TESTED}")
    return blocks


def disable_dropout(hf: PreTrainedModel) -> None:
    """No dropout and no router noise: engines have none, and the ratio to the behavior policy would be noisy.

    Inference mode turns them off. What may recompute its activations must stay in training mode; its rates become 0.
    """
    for module in hf.modules():
        module.training = hasattr(module, "gradient_checkpointing")
        for name, value in vars(module).items() if module.training else ():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


@torch.no_grad()
def fix_longrope(hf: PreTrainedModel, *, max_model_len: int) -> None:
    """Choose the factors of LongRoPE as engines do: the long ones if the engine's context (`max_model_len`, tokens)
    exceeds that of pretraining. Transformers would choose again by the longest sequence of every micro-batch."""
    for rotary in _longropes(hf):
        rotary(rotary.inv_freq, torch.tensor([[max_model_len - 1]], device=rotary.inv_freq.device))
        rotary.rope_type = "fixed"  # a type that transformers leaves alone


def _longropes(hf: PreTrainedModel) -> list[Any]:
    return [module for module in hf.modules() if getattr(module, "rope_type", None) == "longrope"]


def _check_rotary(hf: PreTrainedModel) -> None:
    """Raises ModelError for frequencies that `fix_longrope` does not fix and that change with what is in a batch."""
    for module in hf.modules():
        kind: Any = getattr(module, "rope_type", "")
        per_layer_type = isinstance(kind, dict)
        for text in kind.values() if per_layer_type else [kind]:
            if "dynamic" in text or (per_layer_type and text == "longrope"):
                raise ModelError(
                    f"{type(hf).__name__} has rotary embeddings of type {text}, which depend on the longest sequence "
                    "of a micro-batch and differ from the engine's; take the scaling out of config.json, or use "
                    f"{TESTED}"
                )


class _Trace:
    """A packed layout that computes nothing and notes which blocks use it."""

    def __init__(self) -> None:
        self.block = -1  # the one that runs
        self.attended: set[int] = set()
        self.is_plain = True

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
        self.attended.add(self.block)
        self.is_plain &= how.is_plain
        return torch.empty_like(q_THD)


def _run_once(hf: PreTrainedModel, blocks: nn.ModuleList) -> bool:
    """Whether all scores are plain. Raises ModelError if `hf`, which is on the meta device and is not used again, does
    not run packed."""
    name, trace = type(hf).__name__, _Trace()
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, index=index: setattr(trace, "block", index))
    for rotary in _longropes(hf):
        rotary.rope_type = "fixed"
    one_T = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            hf.base_model(input_ids=one_T, position_ids=one_T, use_cache=False, packed=trace)
    except CONFIG_ERRORS as error:
        raise ModelError(f"{name} cannot run packed ({type(error).__name__}: {error}); use {TESTED}") from error
    if missing := sorted(set(range(len(blocks))) - trace.attended):
        raise ModelError(
            f"{name} has {len(missing)} of {len(blocks)} blocks without attention (the first is {missing[0]}), and "
            f"packed sequences would see each other in them; use {TESTED}"
        )
    return trace.is_plain


class PolicyOutput(NamedTuple):
    """A tuple, because FSDP2 looks for tensors in a module's output."""

    logprobs_L: Tensor
    """float32, of the loss tokens, after temperature."""
    entropy_L: Tensor
    """float32, nats; with gradient only for an entropy bonus."""
    values_L: Tensor | None
    """float32, if the critic shares the backbone."""


class PolicyModel(RootModel):
    """Backbone, output matrix and chunked log-probs in one forward.

    One module, because FSDP2 gathers the root's parameters (embedding and output matrix) for the root's forward only.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        cfg: RunConfig,
        *,
        device: torch.device,
        value_head: ValueHead | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """`device` will compute. `value_head` is of a critic that shares the backbone; it is not in `hf`, so nothing
        publishes it. Log-probs are among the first `num_tokens` tokens, or all."""
        super().__init__()
        self._num_tokens = num_tokens
        self.hf = hf
        self.value_head = value_head
        self._head = Head(
            temperature=cfg.rollout.temperature,
            chunk_tokens=cfg.learner.logprob_chunk_size,
            entropy_has_grad=cfg.algorithm.entropy_coef > 0,
            float32=cfg.learner.fp32_head is not False,
            compiled=compiles(cfg, device),
            softcap=getattr(hf.config.get_text_config(), "final_logit_softcapping", None),
        )

    def forward(self, inputs: PackedInputs) -> PolicyOutput:
        """Log-probs, entropy and values of the loss tokens."""
        hidden_LE = predicting_states(self.hf, inputs)
        logprobs_L, entropy_L = selected_logprobs(
            hidden_LE,
            cast("nn.Linear", self.hf.get_output_embeddings()).weight[: self._num_tokens],
            inputs.target_L,
            self._head,
        )
        values_L = None if self.value_head is None else self.value_head(hidden_LE)
        return PolicyOutput(logprobs_L, entropy_L, values_L)

    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves: parameters of the model by their names in it, and of the value head."""
        named = ((name.removeprefix("hf."), param) for name, param in self.named_parameters())
        return {name: param for name, param in named if param.requires_grad}


def predicting_states(hf: PreTrainedModel, inputs: PackedInputs) -> Tensor:
    """Last hidden states at the positions that predict the loss tokens, [L, E] in the compute dtype."""
    output = hf.base_model(
        input_ids=inputs.token_ids_1T, position_ids=inputs.position_ids_1T, use_cache=False, packed=inputs.layout
    )
    return output.last_hidden_state.squeeze(0).index_select(0, inputs.predict_pos_L)


class MetaModel(NamedTuple):
    """A causal LM without memory, of a kind that we can run packed."""

    hf: PreTrainedModel
    blocks: nn.ModuleList
    source_dir: Path
    """Where config, tokenizer and (if any) weights come from."""
    is_random_init: bool
    """Its weights are drawn from the seed."""
    is_plain: bool
    """Its attention is: see `Scores`."""


class BuiltPolicy(NamedTuple):
    """A model that is ready to train."""

    policy: PolicyModel
    """Call this one: its hooks have the parameters ready."""
    layout: LayoutFn
    """The packed layout of its attention."""
    source_dir: Path
    """Where config, tokenizer and (if any) weights came from."""
    device: torch.device
    """Where the forward runs."""
    group: ContextGroup | None
    """Computes every micro-batch together."""

    def forward(self, batch: MicroBatch) -> PolicyOutput:
        """The policy's output for the loss tokens. Collective."""
        inputs = PackedInputs.of(batch, device=self.device, layout=self.layout, group=self.group)
        output: PolicyOutput = self.policy(inputs)
        if self.group is None or inputs.owner_L is None:
            return output
        logprobs_L, entropy_L, *values = self.group.gather([x for x in output if x is not None], inputs.owner_L)
        return PolicyOutput(logprobs_L, entropy_L, values[0] if values else None)

    @torch.no_grad()
    def no_grad_forward(self, batch: MicroBatch) -> PolicyOutput:
        """`forward` without a backward to follow. Collective."""
        output = self.forward(batch)
        self.policy.release()
        return output


def build_policy(cfg: RunConfig, context: ParallelContext) -> BuiltPolicy:
    """Load the policy (or draw it from `cfg.seed`), sharded, masters in `learner.master_dtype` (with LoRA: those of
    the adapters, in float32). Raises ModelError for missing or damaged files, or a kind of model we do not train."""
    meta = meta_model(cfg.model.path, cfg, dtype=cfg.learner.master_dtype)
    if cfg.model.lora.rank:
        add_adapters(meta.hf, meta.blocks, cfg.model.lora, base_dtype=torch_dtype(cfg.model.compute_dtype))
    shares = cfg.algorithm.uses_critic and cfg.critic.shared_backbone
    policy = PolicyModel(
        meta.hf, cfg, device=context.device, value_head=ValueHead(hidden_size(meta.hf)) if shares else None
    )
    layout = shard_and_load(policy, meta, cfg, context=context, cpu_offload=cfg.learner.cpu_offload)
    init_adapters(meta.hf, seed=cfg.seed)
    return BuiltPolicy(
        policy=policy, layout=layout, source_dir=meta.source_dir, device=context.device, group=context.group
    )


def meta_model(path: str, cfg: RunConfig, *, dtype: str = "float32") -> MetaModel:
    """The model in `path`, which is one of `model_paths`, without memory, its parameters in `dtype`, with our
    attention. Raises as `build_policy`."""
    source_dir = resolve_model_dir(path, key=next(key for key, named in model_paths(cfg).items() if named == path))
    config = load_config(cfg.model, source_dir)
    is_plain = check_packed(config, source_dir, cfg)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=cfg.model.trust_remote_code,
        )
    for param in hf.parameters():  # not as transformers does it, which takes buffers along
        param.data = param.data.to(getattr(torch, dtype))
    return MetaModel(hf, check_architecture(hf), source_dir, is_random_init(cfg.model, path), is_plain)


def shard_and_load(
    root: RootModel, meta: MetaModel, cfg: RunConfig, *, context: ParallelContext, cpu_offload: bool
) -> LayoutFn:
    """Shard `root`, which holds the meta model, then give it memory and weights: no rank ever holds more than its part.
    One rank that has the room is not sharded at all.

    Returns the packed layout of its attention. Raises ModelError if the weights are missing or damaged.
    """
    hf, compute_dtype = meta.hf, torch_dtype(cfg.model.compute_dtype)
    is_trained = any(param.requires_grad for param in root.parameters())
    _prepare_blocks(hf, meta.blocks, cfg, device=context.device, is_trained=is_trained)
    heads = [module for module in root.modules() if isinstance(module, ValueHead)]
    if context.tensor_mesh is not None:
        divide_blocks(hf, meta.blocks, check_divisible(hf, meta.blocks, cfg.learner), context.tensor_mesh)
    room = UNSHARDED_SHARE * context.backend.memory_info()[1]
    copied = sum(p.numel() for p in hf.parameters() if p.dtype != compute_dtype)
    is_whole = context.mesh.size() == 1 and not cpu_offload and copied * compute_dtype.itemsize <= room
    if not is_whole:
        num_params = sum(local_tensor(p).numel() for p in hf.parameters())
        root.stays_whole = is_trained and num_params * compute_dtype.itemsize <= room
        shard_model(
            root,
            meta.blocks,
            float32_modules=heads,
            mesh=context.mesh,
            block_mesh=context.block_mesh,
            compute_dtype=compute_dtype,
            reshards_after_forward=not root.stays_whole,
            cpu_offload=cpu_offload,
        )
    allocate(root, hf, torch.device("cpu") if cpu_offload else context.device, buffers=context.device)
    if is_whole:
        root.compute_weights = ComputeWeights(root, dtype=compute_dtype, float32_modules=heads)
    rollout, longest = cfg.rollout, cfg.task.max_prompt_tokens + cfg.rollout.max_response_tokens
    fix_longrope(hf, max_model_len=rollout.max_model_len if rollout.max_model_len else longest)
    fill_weights(meta, cfg, device=context.device)
    for head in heads:
        head.reset()
    disable_dropout(hf)
    return best_layout(context.device, compute_dtype, head_dim=head_dim(hf.config), is_plain=meta.is_plain)


def hidden_size(hf: PreTrainedModel) -> int:
    return int(hf.config.get_text_config().hidden_size)


def vocab_size(hf: PreTrainedModel) -> int:
    """Rows of the embedding: often more than the tokenizer has tokens, to a round number."""
    return int(hf.config.get_text_config().vocab_size)


def require_tokens(who: str, hf: PreTrainedModel, policy: PreTrainedModel, why: str) -> None:
    """Raises ModelError if a model that gets the policy's tokens knows fewer."""
    known, needed = vocab_size(hf), vocab_size(policy)
    if known < needed:
        raise ModelError(
            f"{who} has {known} tokens, the policy {needed}; {why}, use a model of the same family with at least as "
            "many"
        )


def fill_weights(meta: MetaModel, cfg: RunConfig, *, device: torch.device) -> None:
    """Weights from safetensors (own rows only), else through transformers' conversion; or from the seed, drawn on
    `device`. Raises ModelError if they are missing or damaged."""
    hf, source_dir = meta.hf, meta.source_dir
    check_weights(source_dir, is_random_init=meta.is_random_init)
    if meta.is_random_init:
        init_weights(hf, seed=cfg.seed, device=device)
        return
    files = checkpoint_files(source_dir)
    if files is not None and load_rows(hf, files):
        return
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source_dir, dtype=torch.float32, trust_remote_code=cfg.model.trust_remote_code, output_loading_info=True
        )
        whole, found = loaded
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"weights in {source_dir} cannot be loaded: {error}") from error
    # Transformers draws what is missing, with other numbers on every rank. What we do not hold (a critic's output
    # matrix) may be missing.
    state, drawn = dict(whole.named_parameters()) | dict(whole.named_buffers()), set(found["missing_keys"])
    if missing := sorted(part.name for part in own_parts(hf) if part.name in drawn or part.name not in state):
        raise ModelError(
            f"{source_dir} has no weights for {missing[0]} ({len(missing)} tensors are missing), which its config.json "
            "asks for; finish the download, or give the directory of the whole model"
        )
    for part in own_parts(hf):
        part.tensor.copy_(state[part.name][part.box])


def torch_dtype(name: str) -> torch.dtype:
    """Raises ModelError for float16, whose small gradients would need loss scaling."""
    if name not in {"float32", "bfloat16"}:
        raise ModelError(f"model.compute_dtype must be float32 or bfloat16 for training, got {name!r}")
    return getattr(torch, name)


def _prepare_blocks(
    hf: PreTrainedModel, blocks: nn.ModuleList, cfg: RunConfig, *, device: torch.device, is_trained: bool
) -> None:
    recomputes = is_trained and cfg.learner.activation_checkpointing
    if recomputes is True:
        kwargs = {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    for block in blocks:
        # The forward, not the module: FSDP2's hooks then stay outside, and names of parameters stay as they are.
        if recomputes == "selective":
            # Inside of what is compiled, whose operations it could not see otherwise.
            block.forward = functools.partial(_recompute_cheap, block.forward)
        if compiles(cfg, device):
            # A compiler that fails, as without a C compiler on the host, costs time and no run.
            torch._dynamo.config.suppress_errors = cfg.learner.compile == "auto"
            block.forward = torch.compile(block.forward, dynamic=True, options=_compile_options())


def compiles(cfg: RunConfig, device: torch.device) -> bool:
    """Whether blocks are compiled."""
    if cfg.learner.compile != "auto":
        return cfg.learner.compile
    return device.type != "cpu" and has_triton()


def _recompute_cheap(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward`, of which the backward recomputes all but matrix products and attention."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


def _keep_products(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = operation.name()
    is_kept = name in MATRIX_PRODUCTS or "attn" in name or "attention" in name
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _compile_options() -> dict[str, Any]:
    """One compiled block for micro-batches of every size. Left alone, inductor fuses the reductions of a norm's
    backward in large ones only, with guards: the first smaller one recompiles for 4 to 14 s."""
    from torch._inductor import config

    name = "mix_order_reduction_non_strict_mode"  # not every version of torch has it
    return {f"triton.{name}": True} if hasattr(config.triton, name) else {}


def allocate(root: nn.Module, hf: PreTrainedModel, device: torch.device, *, buffers: torch.device) -> None:
    """Give the model memory, and have transformers compute the buffers that no checkpoint holds (rotary)."""
    tied = [places for _, places in parameter_places(root) if len(places) > 1]
    root.to_empty(device=device)
    for (first, name), *others in tied:  # which torch gives memory of their own
        for module, other in others:
            module._parameters[other] = first._parameters[name]
    with torch.no_grad():
        for module in hf.modules():
            if any(True for _ in module.buffers(recurse=False)):
                module._apply(lambda tensor: tensor.to(buffers), recurse=False)
                hf._init_weights(module)


class ValueHead(nn.Module):
    """v = h . w + b in float32: half precision could not tell apart returns near 1. It starts at 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=torch.float32))
            self.bias = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def forward(self, hidden_LE: Tensor) -> Tensor:
        """float32[L]"""
        # Not a squeezed [L, 1]: FSDP2 hooks outputs, and those must not be views.
        return torch.mv(hidden_LE.float(), self.weight[0]) + self.bias

    @torch.no_grad()
    def reset(self) -> None:
        """Zero this rank's part, once there is memory."""
        for param in self.parameters():
            local_tensor(param).zero_()
