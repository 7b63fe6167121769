"""Schema of the configuration: one dataclass per section, holding every default exactly once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trainer.config.algorithm import AlgorithmConfig, CriticConfig
from trainer.config.field import Bool, EnvText, Float, Int, Key, Name, OnOff, PathText, Text, key, keys_of, section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@section
class CheckpointConfig:
    every_steps: Int = key(50, "Save after every so many steps; 0 saves at the end only.", ge=0)
    keep_last: Int = key(2, "The newest complete checkpoints to keep.", ge=1)
    keep_every: Int = key(
        0, "Beside those, keep every checkpoint whose step is divisible by this, for ever; 0 keeps none.", ge=0
    )
    resume: PathText = key(
        "auto",
        "`auto` resumes from the newest checkpoint in `run_dir` if there is one, `never` refuses a run directory that "
        "has one. A path resumes from that checkpoint, or the newest that run directory has; a later start with "
        "the same path resumes from the newest that followed. What does not lead to it, such as later steps of the "
        "same `run_dir`, moves to `checkpoints/abandoned`.",
    )
    save_at_end: Bool = key(
        True,
        "Save a checkpoint after the last step. A run that is interrupted, or fails beside its learner, always does.",
    )
    export_hf: Bool = key(True, "At the end, write the policy as a Hugging Face model to `run_dir/export`.")


DeviceName = Literal["auto", "cpu", "cuda", "rocm", "npu"]

OTHER_WORDS = {
    "gpu": "device=auto takes the GPU that is present; by name it is device=cuda (NVIDIA) or device=rocm (AMD)"
}
"""What to write instead of a word that names no device."""


@section
class DeviceConfig:
    name: DeviceName = key("auto", "Accelerator; `auto` takes the first that is present: cuda, rocm, npu, cpu.")
    peak_tflops: Float | None = key(
        None,
        "Dense TFLOP/s of one learner device in `model.compute_dtype`, which `perf/mfu` compares with; null is the "
        "data sheet's bfloat16 for B200, H200, H100, H800, H20, A100, A800, L40S, MI300X and MI325X, and no "
        "`perf/mfu` for any other.",
        gt=0,
    )
    env: dict[Name, EnvText] = key(
        factory=dict, doc="Extra environment variables for every learner and engine process; they win over ours."
    )
    cpu_threads: Int = key(
        1, "Compute threads per learner rank and per engine on `cpu`; ignored on accelerators.", ge=1
    )


@section
class LearnerConfig:
    num_ranks: Int = key(2, "Learner processes, one per device (FSDP2 shards over all of them).", ge=1)
    lr: Float = key(1e-6, "Peak learning rate (AdamW).", gt=0)
    lr_schedule: Literal["constant", "cosine", "linear"] = key("constant", "Schedule after the warm-up.")
    min_lr_ratio: Float = key(
        0.0, "Learning rate at the end of a cosine or linear schedule, as a share of `lr`.", ge=0, le=1
    )
    warmup_steps: Int = key(0, "Steps of linear warm-up.", ge=0)
    weight_decay: Float = key(0.01, "AdamW weight decay (not on norms and biases).", ge=0)
    beta1: Float = key(0.9, "AdamW beta1.", ge=0, lt=1)
    beta2: Float = key(0.999, "AdamW beta2.", ge=0, lt=1)
    eps: Float = key(1e-8, "AdamW epsilon.", gt=0)
    max_grad_norm: Float = key(1.0, "Gradient norm is clipped to this.", gt=0)
    max_skipped_steps: Int = key(
        3,
        "Steps in a row whose gradient is not finite, and that are skipped: weights and moments stay as they were. One "
        "more ends the run, after a save.",
        ge=0,
    )
    max_tokens_per_micro_batch: Int = key(16384, "Packed tokens per micro-batch and rank.", ge=1)
    logprob_chunk_size: Int = key(1024, "Tokens whose logits exist at once.", ge=1)
    activation_checkpointing: Bool = key(False, "Recompute each block in the backward.")
    compile: Bool = key(
        False,
        "torch.compile each block: 1.1 to 1.4 times as fast on an H200, for up to a minute of the start on a new host. "
        "On a CPU, where it takes minutes, only the command line or a YAML file of your own turns it on.",
    )
    cpu_offload: Bool = key(False, "Keep parameters and optimizer state in host memory (FSDP2 CPU offload).")
    reference_cpu_offload: Bool = key(
        False, "Keep the reference (`algorithm.kl.coef` > 0) in host memory between its forward passes."
    )
    port: Int = key(
        0,
        "Port where learner ranks meet (on rank 0's node); 0 takes a free one; fix it where a firewall needs to know.",
        ge=0,
        le=65535,
    )
    timeout_s: Float = key(1800.0, "Deadline of one learner call (step, checkpoint) and of its collectives.", gt=0)


@section
class ModeConfig:
    name: Literal["async", "one_step_off", "sync", "colocated"] = key(
        "async",
        "`colocated`: learners and engines take turns on the same devices (accelerators have one learner rank and one "
        "engine worker each). All others have devices of their own for both, and differ by `max_staleness` alone.",
    )
    max_staleness: Int = key(
        1, "S: policy versions a trained group may be old. 0 is synchronous on-policy training.", ge=0
    )
    in_flight: Literal["keep", "recompute", "abort"] = key(
        "keep",
        "What happens to running requests when new weights are committed: `keep` lets them go on with the cache they "
        "have, `recompute` computes their cache again under the new weights, `abort` gives them back; they go on from "
        "their prefix as new requests. [Which one](staleness.md#running-requests-at-a-commit).",
    )

    @property
    def shares_devices(self) -> bool:
        return self.name == "colocated"


DType = Literal["float32", "bfloat16", "float16"]


@section
class LoraConfig:
    rank: Int = key(
        0,
        "Rank of LoRA adapters: only they are trained and synchronised, the model itself stays as it is. 0 trains all "
        "weights. Engines know 1, 8, 16, 32, 64, 128, 256, 320 and 512.",
        ge=0,
        le=512,
    )
    alpha: Float = key(32.0, "What an adapter adds is multiplied by `alpha / rank`.", gt=0)
    target_modules: Text = key(
        "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj",
        "Linear layers of the decoder blocks that get adapters, by their last name, joined by `+`.",
    )


@section
class ModelConfig:
    path: PathText = key(
        "builtin:tiny",
        "Hugging Face model directory or hub name. `builtin:tiny` is a small Qwen2 that is made and warm-started "
        "on first use and cached in the user cache directory.",
    )
    tokenizer_path: PathText = key("", "Directory or hub name of the tokenizer; empty means `model.path`.")
    random_weights: Bool = key(
        False,
        "Draw the weights from `seed`: `model.path` has a config and no weights. For tests and benchmarks.",
    )
    trust_remote_code: Bool = key(False, "Run Python code that comes with the model or tokenizer.")
    rollout_dtype: DType = key("bfloat16", "Type of the weights in the engine, and of what weight sync moves.")
    compute_dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16", "Type of the learner's forward and backward; masters stay float32."
    )
    lora: LoraConfig = key(factory=LoraConfig, doc="Train adapters on a frozen model.")


@section
class RayConfig:
    address: Text = key("local", "`local` starts a private cluster for this run; `auto` or an address joins one.")
    num_cpus: Int = key(0, "Logical CPUs of the private cluster; 0 means enough for the actors asked for.", ge=0)
    object_store_gib: Float = key(0.25, "Object store of the private cluster, GiB.", gt=0)
    placement_timeout_s: Float = key(
        60.0, "Longest wait, on a cluster that is joined, until the resources of all actors are set aside.", gt=0
    )


@section
class RolloutConfig:
    group_size: Int = key(8, "Samples per prompt.", ge=1)
    num_replicas: Int = key(1, "Independent engines.", ge=1)
    tensor_parallel_size: Int = key(1, "Devices per engine.", ge=1)
    num_workers: Int = key(1, "Rollout worker processes (CPU) that drive the engines and run rewards.", ge=1)
    temperature: Float = key(
        1.0, "Sampling temperature of training rollouts, in the range in which vLLM takes it as it is.", ge=0.01, le=2
    )
    top_p: Float = key(
        1.0,
        "Nucleus sampling of training rollouts. Below 1 equal weights have a ratio of learner to engine below 1, so "
        "only `algorithm.loss=importance_sampling`, or a loss of your own, takes it.",
        gt=0,
        le=1,
    )
    top_k: Int = key(
        0, "Top-k sampling of training rollouts; 0 keeps the whole vocabulary. What holds for `top_p` holds here.", ge=0
    )
    per_request_seed: Bool | None = key(
        None,
        "Whether every request has a seed of its own, which a run that is to repeat itself needs and which costs an "
        "engine some speed; otherwise the engines draw from `seed` in the order of their work. null is true with "
        "`mode.max_staleness=0` and false above, where timing decides what is trained.",
    )
    stop_token_ids: list[Int] = key(
        factory=list,
        doc="Tokens that end an answer, beside the end tokens of the model's generation config and of the tokenizer. "
        "Like these they are part of the answer and trained. Evaluation uses them too.",
    )
    stop: list[Text] = key(
        factory=list,
        doc="Texts that end an answer, with the token that completes one of them; special tokens spelled out. Their "
        "tokens are part of the answer and trained. Evaluation uses them too, and agent loops may ask for others.",
    )
    max_response_tokens: Int = key(1024, "Longest answer, in tokens.", ge=1)
    max_model_len: Int = key(0, "Engine context length; 0 means prompt plus response limits.", ge=0)
    max_num_seqs: Int = key(256, "Most sequences an engine runs at once.", ge=1)
    concurrency: Literal["fixed", "adaptive"] = key(
        "fixed",
        "How many requests an engine has at once; the others wait, the oldest group first, and go where room is first. "
        "`fixed`: `max_concurrency`. `adaptive`: between `min_concurrency` and `max_concurrency`, fewer while the "
        "engine preempts or fills its KV cache, more while it has room.",
    )
    min_concurrency: Int = key(1, "Fewest requests of an engine at once, with `concurrency=adaptive`.", ge=1)
    max_concurrency: Int | None = key(
        None,
        "Most requests of an engine at once; null is `max_num_seqs` with `concurrency=adaptive`, and no limit with "
        "`fixed`. Shared out evenly over the rollout workers.",
        ge=1,
    )
    engine_stats: Bool = key(
        False,
        "Engines report the use of their KV cache, preemptions and what waits inside them (`engine/kv_usage_frac/*`, "
        "`engine/preemptions/*`, `engine/waiting/*`), which costs their front end some time in every step. "
        "`concurrency=adaptive` always needs it.",
    )
    repack_below: Int | None = key(
        None,
        "When nothing waits to be sent, an engine with fewer requests than this hands them over to fuller ones that "
        "have room for all of them, and stays empty until there is a new group. Prompt and tokens so far are computed "
        "again. null never moves a request.",
        ge=2,
    )
    gpu_memory_utilization: Float = key(0.85, "Share of device memory for an engine (accelerators).", gt=0, le=1)
    kv_cache_gib: Float = key(1.0, "KV cache of an engine on `cpu`, GiB.", gt=0)
    enforce_eager: Bool = key(False, "Never capture device graphs.")
    stream_interval: Int = key(
        64,
        "Tokens per streamed chunk; a dead engine loses at most one chunk, and a live one gives a sign of life with "
        "each, which must take much less than heartbeat_timeout_s.",
        ge=1,
        le=1024,
    )
    request_timeout_s: Float = key(
        600.0,
        "Longest time the answers of a group may take to generate (with `task.agent`: one turn of them), waits for "
        "room and moves to other engines included; those that are not done then have failed.",
        gt=0,
    )
    max_retries: Int = key(2, "Retries of a prompt whose group failed, before it is dropped and counted.", ge=0)
    max_engine_restarts: Int = key(
        3,
        "Times that a lost engine is started again while the run trains; 0 leaves it out for good. An hour without a "
        "loss gives it all of them back.",
        ge=0,
    )
    max_worker_restarts: Int = key(
        3,
        "Times that each lost rollout worker is started again; one that has lived for an hour since has all of them "
        "again. While the run trains, it fails when no worker is left.",
        ge=0,
    )
    heartbeat_timeout_s: Float = key(
        120.0,
        "An engine that answers nothing for so long is lost, and so is one that has requests and gives no token, "
        "unless it is paused or asleep; a rollout worker is lost after half of it. What is lost is ended and started "
        "again.",
        gt=0,
    )
    engine_args: dict[Name, Any] = key(
        factory=dict,
        doc="Further vLLM engine arguments, passed as they are. Refused are those that have a key of their own, and "
        "those that weight sync and log-probs rely on.",
    )


@section
class RewardConfig:
    name: PathText = key(
        "arithmetic",
        "A registered reward (`arithmetic`, `math`; `zero` where an environment rewards the turns), or your own "
        "function as `path/to/file.py:name` or `package.module.name`.",
    )
    column: Text = key(
        "",
        "Column that names the reward of each row, as `name` does, for data sets of several kinds of tasks. Where it "
        "is null, empty or not there, `name` holds; held-out data may have no such column at all.",
    )
    timeout_s: Float = key(10.0, "Wall-clock limit of one reward call; past it the process is killed.", gt=0)
    num_processes: Int = key(2, "Killable reward processes per rollout worker.", ge=1)
    max_concurrency: Int = key(
        32, "Calls of an `async def` reward at once, per rollout worker; they share one process.", ge=1
    )
    queue_timeout_s: Float = key(
        600.0,
        "Longest wait of an answer for a free reward process, or for its turn to call an `async def` reward; past it, "
        "its reward has failed.",
        gt=0,
    )


@section
class EvalSetConfig:
    path: PathText = key("", "Held-out prompts, as in `task.eval_path`.")
    split: Text = key("test", "Split of a Hugging Face data set.")
    size: Int = key(0, "Prompts per evaluation; 0 means all.", ge=0)
    samples: Int | None = key(None, "Answers per prompt; null is `trainer.eval_samples`.", ge=1)
    prompt_column: Text = key("", "Column with the prompt; empty is `task.prompt_column`.")
    answer_column: Text = key("", "Column with the ground truth; empty is `task.answer_column`.")


@section
class TaskConfig:
    name: Text = key("arithmetic", "Shown in logs and metrics.")
    reader: Literal["auto", "arithmetic", "jsonl", "parquet", "hf"] = key(
        "auto", "How `train_path` is read; `auto` goes by its suffix, else a Hugging Face data set."
    )
    train_path: PathText = key(
        "builtin:arithmetic", "Training prompts: a file, a directory, a hub name, or `builtin:arithmetic`."
    )
    eval_path: PathText = key("builtin:arithmetic", "Held-out prompts, likewise; empty turns evaluation off.")
    eval_sets: dict[Name, EvalSetConfig] = key(
        factory=dict,
        doc="Further held-out prompts beside `eval_path`, by name: each has its own `eval/NAME/accuracy`. Those of "
        "`eval_path` remain the ones that `eval/accuracy` and `trainer.stop_at_accuracy` are about.",
    )
    train_split: Text = key("train", "Split of a Hugging Face data set for training.")
    eval_split: Text = key("test", "Split of a Hugging Face data set for evaluation.")
    prompt_column: Text = key("prompt", "Column with the prompt: a string, or a list of chat messages.")
    answer_column: Text = key("answer", "Column with the ground truth; may be missing if the reward needs none.")
    apply_chat_template: Bool = key(False, "Wrap string prompts as one user message in the tokenizer's chat template.")
    chat_template_kwargs: dict[Name, Any] = key(
        factory=dict,
        doc="Further arguments of the chat template, such as `{enable_thinking: false}`; the template must read each.",
    )
    system_prompt: Text = key("", "System message put before every prompt when a chat template is applied.")
    max_prompt_tokens: Int = key(512, "Longest prompt, in tokens.", ge=1)
    overlong_prompts: Literal["error", "filter"] = key(
        "filter", "What to do with prompts over `max_prompt_tokens`: refuse to start, or drop, counted and logged."
    )
    dedup: Bool = key(
        True,
        "Of rows with the same prompt and answer (and the same reward, with `reward.column`), whatever their other "
        "columns, only the first stays; the others are counted and logged. Training and held-out prompts alike.",
    )
    shuffle: Bool = key(True, "Shuffle training prompts with the run's seed, anew each epoch.")
    curriculum: Literal["none", "easy_to_hard"] = key(
        "none", "`easy_to_hard`: the first `curriculum_epochs` epochs go from easy to hard prompts."
    )
    curriculum_epochs: Int = key(1, "Epochs that go from easy to hard; later ones are in the usual order.", ge=1)
    difficulty_column: Text = key(
        "", "Column with the difficulty for the curriculum, larger is harder; empty goes by `pass_rate_column`."
    )
    pass_rate_min: Float = key(
        0.0, "Prompts that the policy solves more rarely than this rest; above 0, never solved ones do.", ge=0, le=1
    )
    pass_rate_max: Float = key(
        1.0, "Prompts that the policy solves more often than this rest; below 1, always solved ones do.", ge=0, le=1
    )
    pass_rate_cooldown_epochs: Int = key(
        2, "A prompt that rests is passed over so many times, an epoch each, and then tried again.", ge=1
    )
    pass_rate_column: Text = key(
        "",
        "Column with a pass rate of each prompt (0 to 1), measured before the run: counts until a group of it came "
        "back. Null is not known.",
    )
    pass_threshold: Float = key(1.0, "Reward from which a training answer passes.")
    eval_size: Int = key(256, "Prompts per evaluation; 0 means all held-out prompts.", ge=0)
    max_operand: Int = key(49, "builtin:arithmetic only: largest operand of the additions.", ge=9)
    agent: Text = key(
        "",
        "How an answer comes about: empty is a single turn, else a factory of agent loops, as `package.module.name` or "
        "`path/to/file.py:name`, for several turns, tools and environments. Evaluation uses it too.",
    )
    agent_args: dict[Name, Any] = key(factory=dict, doc="Keyword arguments of the factory in `task.agent`.")
    agent_timeout_s: Float = key(
        600.0, "Longest time that one trajectory of `task.agent` may take, its environment included.", gt=0
    )
    agent_max_sequences: Int = key(
        1,
        "Token sequences that one trajectory of `task.agent` may consist of: more than one if it rewrites its history, "
        "or asks on the side. Each may be as long as an answer.",
        ge=1,
    )
    reward: RewardConfig = key(factory=RewardConfig, doc="How answers are judged.")

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
    log_level: Literal["debug", "info", "warning", "error"] = key("info", "Level of log.txt and the screen.")
    progress: Annotated[Literal["auto", "rich", "plain", "off"], OnOff] = key(
        "auto", "Display: a live panel on a terminal, one line per step elsewhere."
    )
    tensorboard: Bool = key(True, "Write TensorBoard events to `run_dir/tb`.")
    trace: Bool = key(True, "Write `run_dir/trace.json` for Perfetto.")
    wandb: Bool = key(False, "Send metrics to Weights & Biases too; needs the extra `wandb`.")
    wandb_project: Text = key("tandem", "Project in Weights & Biases.")
    wandb_entity: Text = key("", "User or team that the project belongs to; empty means the default of the account.")
    wandb_group: Text = key("", "Group that the run is shown in; empty means none.")
    wandb_tags: Text = key("", "Tags of the run, joined by `+`.")
    record_trajectories: Bool = key(
        True,
        "Write every group to `run_dir/trajectories`, before any filter, and every evaluation's answers to "
        "`run_dir/evaluations`.",
    )
    max_trajectories_gib: Float | None = key(
        20.0,
        "GiB that `run_dir/trajectories` may hold at most, and `run_dir/evaluations` as many: what comes later is "
        "counted and not written. A token takes about 20 bytes. null for no bound.",
        gt=0,
    )


@section
class TrainerConfig:
    total_steps: Int = key(100, "Optimizer steps of the whole run, resumes included.", ge=1)
    groups_per_step: Int = key(32, "B: prompts (groups) per optimizer step.", ge=1)
    eval_every: Int = key(
        10,
        "Evaluate after every so many versions, for at most `eval_timeout_s`; one that is due while another runs is of "
        "the next live version after it, or of the last one. 0 turns periodic evaluation off.",
        ge=0,
    )
    eval_at_start: Bool = key(
        True, "Evaluate version 0 (or the resumed version) first, beside training unless `eval_blocking`."
    )
    eval_at_end: Bool = key(True, "Evaluate the last version, also where `eval_every` does not.")
    eval_samples: Int = key(1, "Answers per held-out prompt in an evaluation.", ge=1)
    eval_temperature: Float = key(
        0.0, "Sampling temperature of evaluations: 0 is greedy, otherwise at least 0.01.", ge=0, le=2
    )
    eval_top_p: Float = key(1.0, "Nucleus sampling of evaluations; 1 is the whole vocabulary.", gt=0, le=1)
    eval_pass_k: Int | None = key(
        None,
        "k of `eval/pass_at/k`: how likely one of k answers passes, estimated from `eval_samples` answers; null is "
        "`eval_samples`. `eval/pass_at/1` is always there.",
        ge=1,
    )
    eval_pass_threshold: Float = key(1.0, "Reward from which a held-out answer passes.")
    eval_blocking: Bool = key(
        False,
        "Let the learner wait for each evaluation at the start and between steps; all engines then share its prompts. "
        "Otherwise one engine evaluates beside training.",
    )
    eval_timeout_s: Float = key(
        7200.0,
        "Longest time of one evaluation. One that takes longer, or an answer of which cannot be scored, is reported as "
        "failed, with no number, and training goes on.",
        gt=0,
    )
    stop_at_accuracy: Float | None = key(
        None,
        "Stop successfully once an evaluation reaches this accuracy on `task.eval_path`; null never does.",
        gt=0,
        le=1,
    )
    startup_timeout_s: Float = key(900.0, "Deadline for Ray to start, and again for all actors to be ready.", gt=0)
    shutdown_timeout_s: Float = key(30.0, "Longest orderly shutdown before processes are killed.", gt=0)
    stall_timeout_s: Float = key(
        1800.0, "Stop with the reason if the learner waits for so long for the groups of a step.", gt=0
    )


@section
class WeightSyncConfig:
    transport: Literal["auto", "ipc", "nccl", "hccl", "shm", "gloo"] = key(
        "auto",
        "Data plane: `ipc` maps device memory of the same host, `nccl` (also RCCL) and `hccl` let learners send from "
        "device to device on any host, `shm` goes through shared host memory, `gloo` sends through host memory; `auto` "
        "lets every engine worker take the fastest that a probe proves to work, learner by learner.",
    )
    relay: Annotated[Literal["auto", "off"], OnOff] = key(
        "auto",
        "Whether engines hand a version on to each other: where they outnumber the learners, and so that every byte "
        "enters a node once. Needs staged commits.",
    )
    commit: Literal["auto", "staged", "inplace"] = key(
        "auto",
        "`staged` pulls beside generation and stops it for a local copy; `inplace` pulls while stopped and "
        "needs no memory; `auto` takes `staged` when the shadow fits.",
    )
    num_slots: Int = key(2, "Arena slots per learner rank.", ge=1, le=4)
    timeout_s: Float = key(120.0, "Deadline of one sync, shared by all parties.", gt=0)
    verify: Bool = key(True, "Check digests of what arrived before it is committed.")
    self_test: Bool = key(True, "At start, read the weights back from the engines and compare them bit for bit.")


@section
class RunConfig:
    """Typed, sealed and complete: built once by `trainer.config.compose`, then only read."""

    name: Text = key("tiny", "Name of the run; part of the default run directory.")
    run_dir: PathText = key("", "Directory of this run; empty means `runs/<name>/<time>`.")
    seed: Int = key(0, "Seeds every random choice of the run.", ge=0, le=2**32 - 1)
    device: DeviceConfig = key(factory=DeviceConfig, doc="Accelerator.")
    model: ModelConfig = key(factory=ModelConfig, doc="The policy.")
    task: TaskConfig = key(factory=TaskConfig, doc="Prompts and rewards.")
    algorithm: AlgorithmConfig = key(factory=AlgorithmConfig, doc="The objective.")
    critic: CriticConfig = key(factory=CriticConfig, doc="The value function of PPO.")
    mode: ModeConfig = key(factory=ModeConfig, doc="How far generation runs ahead.")
    rollout: RolloutConfig = key(factory=RolloutConfig, doc="Engines and sampling.")
    learner: LearnerConfig = key(factory=LearnerConfig, doc="Training.")
    weight_sync: WeightSyncConfig = key(factory=WeightSyncConfig, doc="Moving weights.")
    trainer: TrainerConfig = key(factory=TrainerConfig, doc="Length of the run and evaluation.")
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig, doc="Saving and resuming.")
    telemetry: TelemetryConfig = key(factory=TelemetryConfig, doc="Logs and metrics.")
    ray: RayConfig = key(factory=RayConfig, doc="The Ray cluster.")


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
    model, critic, kl = config.model, config.critic, config.algorithm.kl
    return replace(
        config,
        model=replace(model, path=change(model.path)),
        critic=critic if critic.path is None else replace(critic, path=change(critic.path)),
        algorithm=replace(
            config.algorithm,
            kl=kl if kl.reference_model is None else replace(kl, reference_model=change(kl.reference_model)),
        ),
    )


@cache
def all_keys() -> Mapping[str, Key]:
    """Every key and section of `RunConfig` by its dotted path, in the order of the schema."""

    def visit(section: type, prefix: str) -> Iterator[Key]:
        for one in keys_of(section, prefix):
            yield one
            if one.is_section:
                yield from visit(one.hint, f"{one.path}.")

    return {one.path: one for one in visit(RunConfig, "")}


def find_key(path: str) -> Key | None:
    """The key of that path, those in entries of maps of sections included; None if there is none."""
    if path in all_keys():
        return all_keys()[path]
    entry = path.rpartition(".")[0]
    parent = all_keys().get(entry.rpartition(".")[0])
    section = None if parent is None else parent.section_of_entries
    return None if section is None else next((one for one in keys_of(section, f"{entry}.") if one.path == path), None)
