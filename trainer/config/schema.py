"""Schema of the configuration: one dataclass per section, holding every default exactly once."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from pydantic import Field

from trainer.config.algorithm import AlgorithmConfig, CriticConfig
from trainer.config.field import (
    Bool,
    EnvText,
    Float,
    Fraction,
    Int,
    Key,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    OnOff,
    PathText,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    keys_of,
    section,
    value_text,
)
from trainer.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@section
class CheckpointConfig:
    every_steps: NonNegativeInt = 50
    """Save after every so many steps; 0 saves at the end only."""
    asynchronous: Bool = True
    """The learner trains on while a checkpoint is written, from a copy in host memory: with AdamW 12 bytes per trained
    parameter, over all ranks. `false` needs no such memory; the learner waits until the checkpoint is written."""
    keep_last: PositiveInt = 2
    """The newest complete checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """In addition, keep every checkpoint whose step is divisible by this, indefinitely; 0 keeps none."""
    resume: PathText = "auto"
    """`auto` resumes from the newest checkpoint in `run_dir` if there is one; `never` refuses a run directory that has
    one. A path (a checkpoint, or a run directory: its newest) resumes from there, and a later start with the same path
    from the newest that followed. Checkpoints that it does not descend from move to `checkpoints/abandoned`."""
    save_at_end: Bool = True
    """Save a checkpoint after the last step. A run that is interrupted, or fails outside its learner, always does."""
    export_hf: Bool = True
    """At the end, write the policy as a Hugging Face model to `run_dir/export`."""


DeviceName = Literal["auto", "cpu", "cuda", "rocm", "npu"]

OTHER_WORDS = {
    "gpu": "device=auto takes the GPU that is present; by name it is device=cuda (NVIDIA) or device=rocm (AMD)"
}
"""What to write instead of a word that names no device."""


@section
class DeviceConfig:
    name: DeviceName = "auto"
    """Accelerator; `auto` takes the first that is present: cuda, rocm, npu, cpu."""
    peak_tflops: PositiveFloat | None = None
    """Dense TFLOP/s of one learner device in `model.compute_dtype`, the reference of `perf/mfu`; null takes the data
    sheet's bfloat16 for B200, H200, H100, H800, H20, A100, A800, L40S, MI300X and MI325X, and reports no `perf/mfu` for
    any other."""
    env: dict[Name, EnvText] = Field(default_factory=dict)
    """Extra environment variables for every learner and engine process; they win over ours."""
    cpu_threads: PositiveInt = 1
    """Compute threads per learner rank and per engine on `cpu`; ignored on accelerators."""


@section
class ParamGroupConfig:
    pattern: str = ""
    """Names of parameters as in the model's checkpoint; `*` stands for any text: `*.mlp.*`, `*embed_tokens*`."""
    lr_ratio: PositiveFloat = 1.0
    """Their learning rate over `learner.lr`."""
    weight_decay: NonNegativeFloat | None = None
    """Their decay; null is `learner.weight_decay` for matrices, and none for norms and biases."""


@section
class LearnerConfig:
    num_ranks: PositiveInt = 2
    """Learner processes, one per device; one that has the room is not sharded."""
    fsdp_size: PositiveInt | None = None
    """Ranks over which FSDP2 shards weights and optimizer state; all if not set. Fewer (those of a node, say) make
    replicas of them (HSDP), which exchange nothing but one sum of gradients per step. Must divide `num_ranks`."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share every micro-batch, for long contexts: each has a slice of its tokens, in attention a slice of
    the heads (Ulysses). Must divide `num_ranks` and the attention heads of every model."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every micro-batch and divide the matrices of each block, for models of which FSDP2 cannot gather
    a block on one device. Must divide `fsdp_size` (or `num_ranks`) and the heads of every model.
    [What it needs](learner_parallel.md)."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"] = "adamw"
    """`adamw` has two float32 moments, `adamw_bf16` and `adamw_8bit` (which needs torchao) smaller ones. `muon` makes
    the updates of the matrices in the blocks orthogonal, and trains everything else with `adamw`.
    [Which one](optimizers.md)."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights that are trained. bfloat16 takes half the memory, and is rounded stochastically.
    Gradients add up in float32 in any case."""
    param_groups: dict[Name, ParamGroupConfig] = Field(default_factory=dict)
    """Parameters with a learning rate or weight decay of their own, by a name of your choice. The first group that fits
    counts; one that fits no parameter is refused. Of the policy, not of a separate critic."""
    lr_schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Schedule after the warm-up. `wsd` stays at `lr`, then is linear over the last `decay_steps`."""
    decay_steps: PositiveInt | None = None
    """Last steps, of `lr_schedule=wsd`, that lower the learning rate; null is a tenth of all."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of a schedule other than constant, as a fraction of `lr`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay, decoupled as in AdamW (not on norms and biases)."""
    beta1: Annotated[Float, Ge(0), Lt(1)] = 0.9
    """AdamW beta1."""
    beta2: Annotated[Float, Ge(0), Lt(1)] = 0.999
    """AdamW beta2."""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm is clipped to this."""
    updates_per_batch: PositiveInt = 1
    """PPO's epochs: how many optimizer updates every response of a batch takes part in. All updates of a step have the
    same learning rate, and together make one policy version. Advantages and old log-probs are from before the first."""
    num_mini_batches: PositiveInt = 1
    """Mini-batches of a batch, of equally many whole groups: each is an update, so a step makes `updates_per_batch` x
    `num_mini_batches`. They are drawn by `seed` and step, and visited in another order each time."""
    max_skipped_steps: NonNegativeInt = 3
    """Consecutive steps without a finite gradient that are skipped and change nothing. One more ends the run, after a
    save. In a step of several updates only those without a finite gradient are skipped."""
    max_tokens_per_micro_batch: PositiveInt | Literal["auto"] = "auto"
    """Packed tokens per micro-batch and rank: `context_parallel_size` times as many in one that ranks share. `auto`
    measures at the start how many fit on the device, at most 65,536 and no fewer than the longest sequence has; on a
    CPU it is 16,384. A run that resumes keeps its number."""
    logprob_chunk_size: PositiveInt | None = None
    """Tokens whose logits exist at the same time; null makes it 256 MiB of logits, whatever the vocabulary."""
    fp32_head: Bool | None = None
    """Float32 logits, in learner and engines alike: products of the output matrix are not rounded to
    `model.compute_dtype` before the softmax. null does it where the engines can (CUDA or ROCm, a vLLM with
    `head_dtype`), since one side alone is worse than none; false rounds on both sides, as engines without it do."""
    share_prefix: Bool | Literal["auto"] = "auto"
    """Compute the prompt of a group once for all of its responses in a micro-batch, with the same gradient. `auto` does
    on accelerators with the variable-length attention kernel, in steps that it makes faster by 2% or more."""
    activation_checkpointing: Bool | Literal["selective"] = False
    """Recompute each block in the backward, which takes least memory. `selective` keeps the results of matrix products
    and attention, and recomputes the rest."""
    compile: Bool | Literal["auto"] = "auto"
    """torch.compile each block: 1.1 to 1.4 times as fast on H100s and H200s, with less memory, and up to a minute
    longer to start on a new host. `auto` does so on accelerators that Triton supports, and computes without where it
    fails; not on a CPU, where it takes minutes."""
    cpu_offload: Bool = False
    """Keep parameters and optimizer state in host memory (FSDP2 CPU offload)."""
    reference_cpu_offload: Bool = False
    """Keep the reference (`algorithm.kl.coef` > 0) in host memory between its forward passes."""
    port: Annotated[Int, Ge(0), Le(65535)] = 0
    """Port where learner ranks meet (on rank 0's node); 0 takes a free one; set it where a firewall needs to know."""
    timeout_s: PositiveFloat = 1800.0
    """Deadline of one learner call (step, checkpoint) and of its collectives."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates of a step in which no group is left out."""
        return self.updates_per_batch * self.num_mini_batches

    @property
    def num_shards(self) -> int:
        """Ranks that together hold the weights once."""
        return self.num_ranks if self.fsdp_size is None else self.fsdp_size

    @property
    def rank_multiple(self) -> int:
        """The number of ranks must be a multiple of it."""
        return math.lcm(1 if self.fsdp_size is None else self.fsdp_size, self.ranks_per_batch)

    @property
    def ranks_per_batch(self) -> int:
        """Neighbouring ranks that compute every micro-batch together."""
        return self.context_parallel_size * self.tensor_parallel_size

    @property
    def num_batches(self) -> int:
        """Micro-batches that are computed at a time."""
        return self.num_ranks // self.ranks_per_batch


@section
class ModeConfig:
    name: Literal["async", "one_step_off", "sync", "colocated"] = "async"
    """`colocated`: learners and engines alternate on the same devices (accelerators have one learner rank and one
    engine worker each). All others have separate devices for both, and differ by `max_staleness` alone."""
    max_staleness: NonNegativeInt = 1
    """S: maximum age of a trained group, in policy versions. 0 is synchronous on-policy training."""
    in_flight: Literal["keep", "recompute", "abort"] = "keep"
    """What happens to running requests when new weights are committed: `keep` continues with the cache they have,
    `recompute` recomputes their cache under the new weights, `abort` returns them, and they continue from their prefix
    as new requests. [Which one](staleness.md#running-requests-at-a-commit)."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Of `colocated`: whether the learner's memory moves to the host while engines generate, and engines sleep while it
    trains. `auto` spares both where learner and engine fit on the device at the same time."""

    @property
    def shares_devices(self) -> bool:
        return self.name == "colocated"


DType = Literal["float32", "bfloat16", "float16"]


@section
class LoraConfig:
    rank: Annotated[Int, Ge(0), Le(512)] = 0
    """Rank of LoRA adapters: only they are trained and synchronised, the model itself is frozen. 0 trains all weights.
    Engines support 1, 8, 16, 32, 64, 128, 256, 320 and 512."""
    alpha: PositiveFloat = 32.0
    """The output of an adapter is scaled by `alpha / rank`."""
    target_modules: str = "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"
    """Linear layers of the decoder blocks that get adapters, by the last part of their name, joined by `+`."""


@section
class ModelConfig:
    path: PathText = "builtin:tiny"
    """Hugging Face model directory or hub name. `builtin:tiny` is a small Qwen2, created on first use and cached."""
    tokenizer_path: PathText = ""
    """Directory or hub name of the tokenizer; empty means `model.path`."""
    random_weights: Bool = False
    """Initialise the weights randomly from `seed`: `model.path` has a config and no weights. For tests."""
    trust_remote_code: Bool = False
    """Run Python code that comes with the model or tokenizer."""
    rollout_dtype: DType = "bfloat16"
    """Data type of the weights in the engine, and of what weight sync transfers."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the learner's forward and backward; that of the trained weights is `learner.master_dtype`."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Train adapters on a frozen model."""


@section
class RayConfig:
    address: str = "local"
    """`local` starts a private cluster for this run; `auto` or an address joins one."""
    num_cpus: NonNegativeInt = 0
    """Logical CPUs of the private cluster; 0 means enough for all actors."""
    object_store_gib: PositiveFloat = 0.25
    """Object store of the private cluster, GiB."""
    placement_timeout_s: PositiveFloat = 60.0
    """Longest wait, on a cluster that is joined, until the resources of all actors are reserved."""


@section
class RolloutConfig:
    group_size: PositiveInt = 8
    """Samples per prompt."""
    num_replicas: PositiveInt = 1
    """Independent engines."""
    tensor_parallel_size: PositiveInt = 1
    """Devices per engine."""
    engines_per_device: PositiveInt = 1
    """Engines that share a device, with `tensor_parallel_size=1`. For each token an engine does work on the CPU, in one
    process: with a small model and hundreds of responses that takes longer than the device does, and two or four
    engines generate faster than one. They divide `gpu_memory_utilization`. Not used on `cpu`."""
    num_workers: PositiveInt = 1
    """Rollout worker processes (CPU) that drive the engines and run rewards."""
    temperature: Annotated[Float, Ge(0.01), Le(2)] = 1.0
    """Sampling temperature of training rollouts, in the range that vLLM uses unchanged."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling of training rollouts. Below 1, equal weights have a learner-to-engine ratio below 1, so only
    `algorithm.loss=importance_sampling`, or your own loss, accepts it."""
    top_k: NonNegativeInt = 0
    """Top-k sampling of training rollouts; 0 keeps the whole vocabulary. Restricted as `top_p` is."""
    per_request_seed: Bool | None = None
    """Whether every request has its own seed, which a reproducible run needs and which costs an engine some speed; null
    is true with `mode.max_staleness=0` and false above, where timing decides what is trained."""
    stop_token_ids: list[Int] = Field(default_factory=list[int])
    """Tokens that end a response, in addition to the end tokens of the model's generation config and of the tokenizer.
    Like these they are part of the response and trained. Evaluation uses them too."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response, with the token that completes one of them; special tokens spelled out. Their tokens
    are part of the response and trained. Evaluation uses them too, and agent loops may ask for others."""
    max_response_tokens: PositiveInt = 1024
    """Longest response, in tokens."""
    max_model_len: NonNegativeInt = 0
    """Engine context length; 0 means prompt plus response limits."""
    max_num_seqs: PositiveInt | Literal["auto"] = "auto"
    """Maximum number of sequences that an engine runs at once. `auto`: all responses that can be in flight in one wave
    over the engines, or all of an evaluation, at most 512, and no more than its KV cache is expected to hold."""
    concurrency: Literal["fixed", "adaptive"] = "fixed"
    """How many requests an engine has at once; the others wait, the oldest group first, for the first engine with room.
    `fixed`: `max_concurrency`. `adaptive`: between `min_concurrency` and `max_concurrency`, fewer while the engine
    preempts or fills its KV cache, more while it has room."""
    min_concurrency: PositiveInt = 1
    """Minimum number of requests of an engine at once, with `concurrency=adaptive`."""
    max_concurrency: PositiveInt | None = None
    """Maximum number of requests of an engine at once; null is `max_num_seqs` with `concurrency=adaptive`, and no limit
    with `fixed`. Divided evenly among the rollout workers."""
    engine_stats: Bool = False
    """Engines report KV cache usage, preemptions and their queue (`engine/kv_usage_frac/*`, `engine/preemptions/*`,
    `engine/waiting/*`), which costs their front end some time in every step. `concurrency=adaptive` always needs it."""
    repack_below: Annotated[Int, Ge(2)] | None = None
    """When no request waits, an engine with fewer requests than this hands them over to fuller ones with room for all
    of them, and idles until there is a new group; their tokens so far are computed again. null never moves a
    request."""
    gpu_memory_utilization: PositiveFraction = 0.85
    """Fraction of device memory for the engines on it (accelerators)."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache of an engine on `cpu`, GiB. Elsewhere it is what is left of `gpu_memory_utilization`, which an engine
    measures at its start; where others start on its device at the same time, it is planned."""
    enforce_eager: Bool = False
    """Never capture device graphs."""
    stream_interval: Annotated[Int, Ge(1), Le(1024)] = 64
    """Tokens per streamed chunk: the most that a dead engine loses. Each chunk is a heartbeat."""
    request_timeout_s: PositiveFloat = 600.0
    """Longest time to generate the responses of a group (with `task.agent`: one turn of them), including the wait for
    room and moves to other engines; responses that are not done by then have failed."""
    max_retries: NonNegativeInt = 2
    """Retries of a prompt whose group failed, before it is dropped and counted."""
    max_engine_restarts: NonNegativeInt = 3
    """Restarts of a lost engine while the run trains; 0 excludes it. An hour without a loss resets the budget."""
    max_worker_restarts: NonNegativeInt = 3
    """Restarts of each lost rollout worker; an hour without a loss resets the budget. The run fails without workers."""
    heartbeat_timeout_s: PositiveFloat = 120.0
    """An engine that does not respond for this long is lost, and so is one that has requests and yields no token,
    unless it is paused or asleep; a rollout worker is lost after half of it. Lost ones are killed and restarted."""
    engine_args: dict[Name, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, passed unchanged; not those that have a key or that a run relies on."""

    @property
    def num_devices(self) -> int:
        """Accelerators of all engines."""
        return -(-self.num_replicas * self.tensor_parallel_size // self.engines_per_device)


@section
class RewardConfig:
    name: PathText = "arithmetic"
    """A registered reward (`arithmetic`, `math`; `zero` where an environment rewards the turns), or your own function
    as `path/to/file.py:name` or `package.module.name`."""
    column: str = ""
    """Column that names the reward of each row, as `name` does, for data sets of several kinds of tasks. Where it is
    null, empty or missing, `name` applies; held-out data may have no such column at all."""
    timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one reward call; after it the process is killed."""
    num_processes: PositiveInt = 2
    """Killable reward processes per rollout worker."""
    max_concurrency: PositiveInt = 32
    """Calls of an `async def` reward at once, per rollout worker; they share one process."""
    queue_timeout_s: PositiveFloat = 600.0
    """Longest wait of a response for a free reward process or call; after it, its reward has failed."""


@section
class EvalSetConfig:
    path: PathText = ""
    """Held-out prompts, as in `task.eval_path`."""
    split: str = "test"
    """Split of a Hugging Face data set."""
    size: NonNegativeInt = 0
    """Prompts per evaluation; 0 means all."""
    samples: PositiveInt | None = None
    """Responses per prompt; null is `trainer.eval_samples`."""
    prompt_column: str = ""
    """Column with the prompt; empty is `task.prompt_column`."""
    answer_column: str = ""
    """Column with the ground truth; empty is `task.answer_column`."""


@section
class TaskConfig:
    name: str = "arithmetic"
    """Shown in logs and metrics."""
    reader: Literal["auto", "arithmetic", "jsonl", "parquet", "hf"] = "auto"
    """How `train_path` is read; `auto` chooses by its suffix, else a Hugging Face data set."""
    train_path: PathText = "builtin:arithmetic"
    """Training prompts: a file, a directory, a hub name, or `builtin:arithmetic`."""
    eval_path: PathText = "builtin:arithmetic"
    """Held-out prompts, likewise; empty turns evaluation off."""
    eval_sets: dict[Name, EvalSetConfig] = Field(default_factory=dict)
    """Further held-out prompts, by name: each has its own `eval/NAME/accuracy`. `eval/accuracy` and
    `trainer.stop_at_accuracy` remain those of `eval_path`."""
    train_split: str = "train"
    """Split of a Hugging Face data set for training."""
    eval_split: str = "test"
    """Split of a Hugging Face data set for evaluation."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_column: str = "answer"
    """Column with the ground truth; may be missing if the reward needs none."""
    apply_chat_template: Bool = False
    """Wrap string prompts as one user message in the tokenizer's chat template."""
    chat_template_kwargs: dict[Name, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}`; the template must read each."""
    system_prompt: str = ""
    """System message put before every prompt when a chat template is applied."""
    max_prompt_tokens: PositiveInt = 512
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["error", "filter"] = "filter"
    """What to do with prompts over `max_prompt_tokens`: refuse to start, or drop, counted and logged."""
    dedup: Bool = True
    """Of rows with the same prompt and answer (and the same reward, with `reward.column`), regardless of their other
    columns, only the first is kept; the others are counted and logged. Training and held-out prompts alike."""
    shuffle: Bool = True
    """Shuffle training prompts with the run's seed, again in each epoch."""
    curriculum: Literal["none", "easy_to_hard"] = "none"
    """`easy_to_hard`: the first `curriculum_epochs` epochs go from easy to hard prompts."""
    curriculum_epochs: PositiveInt = 1
    """Epochs that go from easy to hard; later ones have the usual order."""
    difficulty_column: str = ""
    """Column with the difficulty for the curriculum, larger is harder; empty uses `pass_rate_column`."""
    pass_rate_min: Fraction = 0.0
    """Prompts with a pass rate below this are excluded for a while; above 0, prompts that are never solved are."""
    pass_rate_max: Fraction = 1.0
    """Prompts with a pass rate above this are excluded for a while; below 1, prompts that are always solved are."""
    pass_rate_cooldown_epochs: PositiveInt = 2
    """An excluded prompt is skipped this many times, once per epoch, and then tried again."""
    pass_rate_column: str = ""
    """Column with the pass rate of a prompt (0 to 1; null is unknown), used until one of its groups is finished."""
    pass_threshold: Float = 1.0
    """Reward from which a training response passes."""
    eval_size: NonNegativeInt = 256
    """Prompts per evaluation; 0 means all held-out prompts."""
    max_operand: Annotated[Int, Ge(9)] = 49
    """builtin:arithmetic only: largest operand of the additions."""
    agent: str = ""
    """How a response is produced: empty is a single turn, else a factory of agent loops, as `package.module.name` or
    `path/to/file.py:name`, for several turns, tools and environments. Evaluation uses it too."""
    agent_args: dict[Name, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory in `task.agent`."""
    agent_timeout_s: PositiveFloat = 600.0
    """Longest time that one trajectory of `task.agent` may take, including its environment."""
    agent_max_sequences: PositiveInt = 1
    """Token sequences that one trajectory of `task.agent` may consist of: more than one if it rewrites its history, or
    asks side questions. Each may be as long as a response."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """How responses are scored."""

    @property
    def held_out_paths(self) -> dict[str, str]:
        """Key -> path of every held-out set."""
        return {"task.eval_path": self.eval_path} | {
            f"task.eval_sets.{name}.path": one.path for name, one in self.eval_sets.items()
        }

    @property
    def filters_pass_rate(self) -> bool:
        return self.pass_rate_min > 0 or self.pass_rate_max < 1


@section
class TelemetryConfig:
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of log.txt and the console."""
    progress: Annotated[Literal["auto", "rich", "plain", "off"], OnOff] = "auto"
    """Display: a live panel on a terminal, one line per step elsewhere."""
    tensorboard: Bool = True
    """Write TensorBoard events to `run_dir/tb`."""
    trace: Bool = True
    """Write `run_dir/trace.json` for Perfetto."""
    wandb: Bool = False
    """Also send metrics to Weights & Biases; needs the extra `wandb`."""
    wandb_project: str = "tandem"
    """Project in Weights & Biases."""
    wandb_entity: str = ""
    """User or team that the project belongs to; empty means the default of the account."""
    wandb_group: str = ""
    """Group that the run is shown in; empty means none."""
    wandb_tags: str = ""
    """Tags of the run, joined by `+`."""
    record_trajectories: Bool = True
    """Write every group, before any filter, to `run_dir/trajectories`, and evaluations to `run_dir/evaluations`."""
    max_trajectories_gib: PositiveFloat | None = 20.0
    """Maximum size in GiB of `run_dir/trajectories`, and of `run_dir/evaluations`; later records are counted and not
    written. A token takes about 20 bytes. null for no limit."""


@section
class TrainerConfig:
    total_steps: PositiveInt = 100
    """Optimizer steps of the whole run, resumes included."""
    groups_per_step: PositiveInt = 32
    """B: prompts (groups) per optimizer step."""
    eval_every: NonNegativeInt = 10
    """Evaluate after this many versions, for at most `eval_timeout_s`; one that is due while another runs evaluates the
    next live version after it, or the last one. 0 turns periodic evaluation off."""
    eval_at_start: Bool = True
    """Evaluate version 0 (or the resumed version) first, concurrently with training unless `eval_blocking`."""
    eval_at_end: Bool = True
    """Evaluate the last version, also where `eval_every` does not."""
    eval_samples: PositiveInt = 1
    """Responses per held-out prompt in an evaluation."""
    eval_temperature: Annotated[Float, Ge(0), Le(2)] = 0.0
    """Sampling temperature of evaluations: 0 is greedy, otherwise at least 0.01."""
    eval_top_p: PositiveFraction = 1.0
    """Nucleus sampling of evaluations; 1 is the whole vocabulary."""
    eval_pass_k: PositiveInt | None = None
    """k of `eval/pass_at/k`: the probability that one of k responses passes, estimated from `eval_samples` responses;
    null is `eval_samples`. `eval/pass_at/1` is always there."""
    eval_pass_threshold: Float = 1.0
    """Reward from which a held-out response passes."""
    eval_blocking: Bool = False
    """The learner waits for each evaluation at the start and between steps; all engines then share its prompts.
    Otherwise one engine evaluates concurrently with training."""
    eval_timeout_s: PositiveFloat = 7200.0
    """Longest time of one evaluation. After it, or if a response cannot be scored, it has failed, and training
    continues."""
    stop_at_accuracy: PositiveFraction | None = None
    """Stop successfully once an evaluation reaches this accuracy on `task.eval_path`; null never does."""
    startup_timeout_s: PositiveFloat = 900.0
    """Deadline for Ray to start, and again for all actors to be ready."""
    shutdown_timeout_s: PositiveFloat = 30.0
    """Longest clean shutdown before processes are killed."""
    stall_timeout_s: PositiveFloat = 1800.0
    """Stop with the reason if the learner waits this long for the groups of a step."""


@section
class WeightSyncConfig:
    transport: Literal["auto", "ipc", "nccl", "hccl", "shm", "gloo"] = "auto"
    """Data plane: `ipc` maps device memory of the same host, `nccl` (also RCCL) and `hccl` let learners send from
    device to device on any host, `shm` uses shared host memory, `gloo` sends through host memory; `auto` lets every
    engine worker take the fastest that a probe proves to work, learner by learner."""
    relay: Annotated[Literal["auto", "off"], OnOff] = "auto"
    """Whether engines forward a version to each other where that saves traffic. Needs staged commits."""
    commit: Literal["auto", "staged", "inplace"] = "auto"
    """`staged` pulls during generation and pauses it for a local copy; `inplace` pulls while generation is paused and
    needs no memory; `auto` takes `staged` when the staging buffer fits."""
    num_slots: Annotated[Int, Ge(1), Le(4)] = 2
    """Arena slots per learner rank. With 1, the pack of a version waits, at most `timeout_s`, until the replicas are
    live with the version before, or frozen. It costs time but cannot deadlock, because no commit waits for a pack."""
    timeout_s: PositiveFloat = 120.0
    """Deadline of one sync, shared by all parties."""
    verify: Bool = True
    """Check digests of received weights before they are committed."""
    self_test: Bool = True
    """At start, read the weights back from the engines and compare them bit for bit."""


@section
class RunConfig:
    """Typed, sealed and complete: built once by `trainer.config.compose`, then only read."""

    name: str = "tiny"
    """Name of the run; part of the default run directory."""
    run_dir: PathText = ""
    """Directory of this run; empty means `runs/<name>/<time>`."""
    seed: Annotated[Int, Ge(0), Le(2**32 - 1)] = 0
    """Seeds every random choice of the run."""
    device: DeviceConfig = Field(default_factory=DeviceConfig)
    """Accelerator."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy."""
    task: TaskConfig = Field(default_factory=TaskConfig)
    """Prompts and rewards."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """The objective."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The value function of PPO."""
    mode: ModeConfig = Field(default_factory=ModeConfig)
    """How far generation runs ahead."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Engines and sampling."""
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    """Training."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """Moving weights."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Length of the run and evaluation."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    """Logs and metrics."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """The Ray cluster."""

    @property
    def evaluates_while_training(self) -> bool:
        return bool(self.task.eval_path) and (self.trainer.eval_every > 0 or self.trainer.eval_at_start)

    @property
    def evaluates(self) -> bool:
        return self.evaluates_while_training or (bool(self.task.eval_path) and self.trainer.eval_at_end)


def model_paths(config: RunConfig) -> dict[str, str]:
    """Key -> the model that it names, the policy first: a directory, a hub name or a built-in one. Keys that are null
    are left out."""
    named = {
        "model.path": config.model.path,
        "critic.path": config.critic.path,
        "algorithm.kl.reference_model": config.algorithm.kl.reference_model,
    }
    return {key: path for key, path in named.items() if path is not None}


def with_model_paths(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """`config` with `change` applied to every path of `model_paths`."""
    for key, path in model_paths(config).items():
        config = with_value(config, key, change(path))
    return config


def with_value(section: Any, key: str, value: object) -> Any:
    """`section` with another value of the key at that dotted path; validated again."""
    name, _, rest = key.partition(".")
    return replace(section, **{name: with_value(getattr(section, name), rest, value) if rest else value})


@cache
def all_keys() -> Mapping[str, Key]:
    """Every key and section of `RunConfig` by its dotted path, in the order of the schema."""

    def visit(section: type, prefix: str = "") -> Iterator[Key]:
        for one in keys_of(section, prefix):
            yield one
            if one.is_section:
                yield from visit(one.hint, f"{one.path}.")

    return {one.path: one for one in visit(RunConfig)}


def shown(key: str, value: Any) -> str:
    """A value as one would write it; a map of sections by its names."""
    return ", ".join(value) if value and all_keys()[key].section_of_entries else value_text(value)


def problem(
    config: RunConfig, key: str, message: str, hint: str = "", *related: str, value: str | None = None
) -> Problem:
    """`key` cannot have its value, shown as `value`; by default as the configuration has it."""
    value = shown(key, attrgetter(key)(config)) if value is None else value
    return Problem(key=key, value=value, message=message, hint=hint, related=related)


def find_key(path: str) -> Key | None:
    """The key of that path, those in entries of maps of sections included; None if there is none."""
    if path in all_keys():
        return all_keys()[path]
    entry = path.rpartition(".")[0]
    parent = all_keys().get(entry.rpartition(".")[0])
    section = None if parent is None else parent.section_of_entries
    return None if section is None else next((one for one in keys_of(section, f"{entry}.") if one.path == path), None)
