"""The configuration of the objective, and what each loss and advantage estimator needs and reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from trainer.config.field import Bool, DottedPath, Float, Int, Name, Number, PathText, Text, key, section
from trainer.config.own_function import OwnFunction, is_own, load_own

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


AdvantageName = Literal[
    "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "gdpo", "remax",
    "gae", "zero",
]  # fmt: skip

GpgScale = Literal["nonzero_rewards", "valid_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorTraits:
    """Properties of one estimator; the rewards of the group are always read, except with `uses_parts`."""

    needs_peers: bool
    """Compares the responses to one prompt: needs at least 2, and learns nothing from a group of equal rewards."""
    spans_step: bool = False
    """An advantage also depends on the other groups of the step."""
    uses_parts: bool = False
    """Reads the named parts of the reward, and not their total."""
    reward_to_go: bool = False
    """A token's advantage comes from the rewards of its own turn and later ones, not from the sum of all turns."""
    greedy_baseline: bool = False
    """Every group needs an extra, greedily sampled response, whose reward is the baseline."""
    keys: tuple[str, ...] = ()
    """Keys of `algorithm` that are its keyword arguments; no other estimator reads those. Not for a user's own."""


ESTIMATORS: Mapping[AdvantageName, EstimatorTraits] = {
    "grpo": EstimatorTraits(needs_peers=True, keys=("normalize_by_std",)),
    "rloo": EstimatorTraits(needs_peers=True),
    "reinforce": EstimatorTraits(needs_peers=False, reward_to_go=True),
    "reinforce_pp": EstimatorTraits(needs_peers=False, spans_step=True, reward_to_go=True),
    "reinforce_pp_baseline": EstimatorTraits(needs_peers=True, spans_step=True),
    "opo": EstimatorTraits(needs_peers=True),
    "gpg": EstimatorTraits(needs_peers=True, spans_step=True, keys=("gpg_scale",)),
    "pass_at_k": EstimatorTraits(needs_peers=True, keys=("normalize_by_std",)),
    "gdpo": EstimatorTraits(needs_peers=True, spans_step=True, uses_parts=True, keys=("gdpo_weights",)),
    "remax": EstimatorTraits(needs_peers=False, greedy_baseline=True),
    "gae": EstimatorTraits(needs_peers=False, keys=("gae_gamma", "gae_lambda", "whiten_advantages")),
    "zero": EstimatorTraits(needs_peers=False),
}
"""Each is a function of the same name in `trainer.algorithms.advantages`; gae is finished by the learner's critic."""

OWN_TRAITS = EstimatorTraits(needs_peers=True, spans_step=True)
"""Of a user's estimator that declares none. They promise least: it never sees a lone answer, and nothing relies on the
advantages of a group to depend on that group alone."""

_DECLARED = "estimator_traits"
_Estimator = TypeVar("_Estimator", bound=OwnFunction)


def with_traits(traits: EstimatorTraits) -> Callable[[_Estimator], _Estimator]:
    """A decorator that declares what a user's estimator looks at, in place of `OWN_TRAITS`.

    Example:
        @with_traits(EstimatorTraits(needs_peers=False))
        def my_estimator(groups, *, scale=1.0): ...
    """

    def declare(estimator: _Estimator) -> _Estimator:
        setattr(estimator, _DECLARED, traits)
        return estimator

    return declare


def declared_traits(estimator: OwnFunction) -> EstimatorTraits:
    """What `with_traits` declared, else `OWN_TRAITS`."""
    return cast(EstimatorTraits, getattr(estimator, _DECLARED, OWN_TRAITS))


def traits_of(algorithm: AlgorithmConfig) -> EstimatorTraits:
    """Of the estimator that `algorithm.advantage_estimator` names; a user's own, by dotted path, is imported for it.

    Raises:
        ConfigurationError: the path does not lead to an estimator.
        ValueError: no such name.
    """
    advantage = algorithm.advantage_estimator
    if is_own(advantage):
        return declared_traits(load_own(advantage, key="algorithm.advantage_estimator", args=algorithm.advantage_args))
    found = cast("Mapping[str, EstimatorTraits]", ESTIMATORS).get(advantage)
    if found is None:
        raise ValueError(
            f"algorithm.advantage_estimator must be one of {', '.join(ESTIMATORS)}, or a dotted path, got {advantage!r}"
        )
    return found


LossName = Literal[
    "ppo_clip", "reinforce", "importance_sampling", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov",
    "dppo_tv", "dppo_kl", "dro",
]  # fmt: skip

AggregationName = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]

RatioLevel = Literal["token", "sequence_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """What one loss reads and holds."""

    keys: tuple[str, ...] = ()
    """Keys of `algorithm` that are its keyword arguments, or choose its tokens; those that no loss names, every loss
    reads."""
    ratio: RatioLevel | None = None
    """The ratio that it is proportional to, at least where it cuts nothing; None: it has none, or bounds it itself."""
    own_bound: tuple[str, str] = ("", "")
    """How it bounds the ratio itself, and what to do instead of a clamp."""
    is_weighted: bool = True
    """Whether the ratio of the policy to the old one weights its gradient."""
    is_bounded: bool = True
    """Whether something keeps that ratio near 1."""
    is_on_policy: bool = False
    """Blind to the age of a sample: refused off policy, unless a correction masks or rejects."""
    selects: tuple[str, ...] = ()
    """The `keys` that choose tokens over the whole step, which it treats differently; empty: it treats all alike."""


_CLIP = ("clip_ratio_low", "clip_ratio_high")

LOSSES: Mapping[LossName, LossTraits] = {
    "ppo_clip": LossTraits(keys=(*_CLIP, "dual_clip"), ratio="token"),
    "reinforce": LossTraits(is_weighted=False, is_on_policy=True),
    "importance_sampling": LossTraits(ratio="token", is_bounded=False),
    "gspo": LossTraits(keys=_CLIP, ratio="sequence_mean"),
    "gmpo": LossTraits(keys=_CLIP, ratio="sequence_mean"),
    "cispo": LossTraits(
        keys=_CLIP,
        own_bound=("bounds its weight itself", "set algorithm.clip_ratio_high, and algorithm.clip_ratio_low below 1"),
    ),
    "sapo": LossTraits(
        keys=("sapo_tau_positive", "sapo_tau_negative"),
        own_bound=("closes a gate of its own", "use null, or algorithm.loss=ppo_clip"),
    ),
    "clip_cov": LossTraits(
        keys=(*_CLIP, "cov_frac", "cov_min", "cov_max"), ratio="token", selects=("cov_frac", "cov_min", "cov_max")
    ),
    "kl_cov": LossTraits(keys=("cov_frac", "cov_kl_coef"), ratio="token", selects=("cov_frac",)),
    "dppo_tv": LossTraits(keys=("dppo_threshold",), ratio="token"),
    "dppo_kl": LossTraits(keys=("dppo_threshold",), ratio="token"),
    "dro": LossTraits(keys=("dro_beta",), is_weighted=False),
}
"""Each is the function `NAME_loss` in `trainer.algorithms.losses`."""
_OWN_LOSS = LossTraits(ratio="token", is_bounded=False)
"""A loss of the user reads no key of another, and is taken to hold the ratio of the token."""

LOSS_KEYS: Mapping[LossName, tuple[str, ...]] = {name: traits.keys for name, traits in LOSSES.items()}
SELECTING_LOSSES: tuple[LossName, ...] = tuple(name for name, traits in LOSSES.items() if traits.selects)


def loss_traits(loss: str) -> LossTraits:
    """Of a built-in loss, or of one of the user by its dotted path.

    Raises:
        ValueError: no such loss.
    """
    found = _OWN_LOSS if is_own(loss) else cast("Mapping[str, LossTraits]", LOSSES).get(loss)
    if found is None:
        raise ValueError(f"algorithm.loss must be one of {', '.join(LOSSES)}, or a dotted path, got {loss!r}")
    return found


Level = Literal["token", "sequence", "sequence_mean"]
Metric = Literal["ratio", "k1", "k2", "k3", "tv"]
Objective = Literal["bypass", "decoupled", "loglinear"]
OBJECTIVES: Mapping[Objective, str] = {
    "bypass": "engine's log-probs as old policy",
    "decoupled": "learner's log-probs at the start of the step as old policy",
    "loglinear": "old policy interpolated by the age of the token",
}
"""In the words of the line that a run logs; each has its `case` in `trainer.algorithms.corrections`."""

_METRICS = (
    "the ratio r itself, the KL estimates k1 = -log r, k2 = (log r)^2 / 2 and k3 = r - 1 - log r, or "
    "tv = |r - 1| / 2, the total variation."
)


@section
class ClampConfig:
    lower: Float | None = key(None, "Smallest importance weight; null for no bound.", gt=0)
    upper: Float | None = key(None, "Largest importance weight (TIS); null for no bound.", gt=0)

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@section
class MaskConfig:
    metric: Metric = key("ratio", f"What the bounds are of: {_METRICS}")
    lower: Float | None = key(None, "Tokens with less of the metric carry no loss; null for no bound.")
    upper: Float | None = key(None, "Tokens with more of the metric carry no loss (MIS, IcePop); null for no bound.")

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@section
class RejectConfig:
    level: Level = key(
        "sequence_mean",
        "What has to keep within the bounds: the metric of every single token, its sum over the answer (for `ratio` "
        "the product), or its mean (for `ratio` the geometric mean).",
    )
    metric: Metric = key("ratio", f"What the bounds are of: {_METRICS}")
    lower: Float | None = key(None, "Answers with less of the metric carry no loss; null for no bound.")
    upper: Float | None = key(None, "Answers with more of the metric carry no loss; null for no bound.")

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@section
class CorrectionConfig:
    objective: Objective = key(
        "bypass",
        "Old policy of the loss. `bypass`: the one that sampled. `decoupled`: the learner's at the start of the step "
        "(a batch is one step, so no forward pass is needed, and a loss with a bound of its own is refused), with its "
        "ratio to the sampling policy as weight of the token. `loglinear`: the same, but interpolated between the two "
        "by the age of the token (A-3PO).",
    )
    level: Level = key(
        "token",
        "Ratio that `clamp` and `mask` look at, and that `decoupled` and `loglinear` weigh with: of the token, of the "
        "whole answer (product), or the geometric mean over the answer. A clamp with `bypass` needs the one that the "
        "loss holds.",
    )
    clamp: ClampConfig = key(factory=ClampConfig, doc="Keep importance weights within bounds.")
    mask: MaskConfig = key(factory=MaskConfig, doc="Tokens out of bounds carry no loss.")
    reject: RejectConfig = key(factory=RejectConfig, doc="Answers out of bounds carry no loss at all.")


KlEstimator = Literal["k1", "k2", "k3", "k1_straight_through", "k3_straight_through"]


@section
class KlConfig:
    coef: Float = key(
        0.0,
        "Weight of the KL divergence of the policy to the reference; 0 keeps no reference.",
        ge=0,
    )
    reference_model: PathText | None = key(
        None,
        "The reference: a Hugging Face model directory or hub name, of any architecture with the policy's tokens (a "
        "teacher); null takes the policy that the run began with.",
    )
    apply_to: Literal["loss", "reward", "advantage"] = key(
        "loss",
        "`loss` adds the KL of the policy being trained to every token's loss (GRPO); `reward` takes the KL of the "
        "policy that sampled off every token's reward, so that the advantages see it (PPO for RLHF); `advantage` takes "
        "it off the token's own advantage, whatever the estimator (on-policy distillation).",
    )
    estimator: KlEstimator = key(
        "k3",
        "From one sampled token, with d = log policy - log reference: k1 = d (not in the loss; the only one in the "
        "advantage), k2 = d^2 / 2, "
        "k3 = exp(-d) - 1 + d; the straight-through forms (only in the loss) have the value of k1 or k3 and the "
        "gradient of k2, which is that of the KL.",
    )

    @property
    def in_loss(self) -> bool:
        return self.coef > 0 and self.apply_to == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coef > 0 and self.apply_to == "reward"

    @property
    def in_advantage(self) -> bool:
        return self.coef > 0 and self.apply_to == "advantage"


_KEEP_OR_DROP = (
    "`score` has the reward function score what was generated by then, as a truncated response; `zero` gives that a "
    "reward of 0 without asking; `drop` leaves it out of training. Without a generated token it is dropped."
)


@section
class OnFailureConfig:
    timeout: Literal["score", "zero", "drop"] = key(
        "drop",
        "A response that took longer than `rollout.request_timeout_s`, or whose agent took longer than "
        f"`task.agent_timeout_s`: {_KEEP_OR_DROP} Dropping favours what is fast.",
    )
    agent_error: Literal["score", "zero", "drop"] = key(
        "drop", f"A trajectory whose agent or environment raised or broke its contract: {_KEEP_OR_DROP}"
    )
    reward_timeout: Literal["zero", "drop"] = key(
        "drop",
        "A response whose reward took longer than `task.reward.timeout_s`: `zero` gives it a reward of 0, right where "
        "only a response can make the reward hang; `drop` leaves it out of training, right where a judge may be down.",
    )


@section
class AlgorithmConfig:
    name: Text = key("grpo", "Shown in logs; the parts below define the objective.")
    advantage_estimator: AdvantageName | DottedPath = key(
        "grpo",
        "Advantage estimator: the reward against the group's mean (grpo), the mean of the others (rloo), or a "
        "length-weighted mean (opo); only the single best answer of a group (pass_at_k); the plain reward (reinforce); "
        "the reward normalised over the step's tokens (reinforce_pp), after the group's mean is taken off "
        "(reinforce_pp_baseline); the group's mean with a factor for answers that teach nothing (gpg); each reward "
        "part normalised in its group (gdpo); per token from the values of a critic (gae); the reward of one "
        "more, greedy answer per group (remax); 0, whatever the reward (zero), "
        "where a teacher alone teaches. Of several turns reinforce and reinforce_pp credit a token with the rewards "
        "from its turn on; the group estimators add them up.",
    )
    advantage_args: dict[Name, Number] = key(
        factory=dict, doc="Your own estimator (a dotted path in `algorithm.advantage_estimator`): its numbers, by name."
    )
    normalize_by_std: Bool = key(
        True, "GRPO and pass@k: divide by the group's standard deviation; false with grpo is Dr. GRPO."
    )
    gpg_scale: GpgScale = key(
        "nonzero_rewards",
        "GPG: the factor is all answers of the step over those with a reward other than 0 (the released "
        "implementation, for rewards of 0 and 1), or over those in groups with unequal rewards (the paper's eq. 7).",
    )
    gae_gamma: Float = key(
        1.0, "GAE: discount per generated token. Below 1, an early token hardly sees the outcome of a long answer.",
        gt=0, le=1,
    )  # fmt: skip
    gae_lambda: Float = key(
        1.0,
        "GAE: 1 takes the return minus the value, which a critic that starts at 0 cannot bias; below 1 trusts the "
        "critic, and fades the outcome by a factor of lambda per token.",
        ge=0,
        le=1,
    )
    whiten_advantages: Bool = key(
        True, "GAE: bring the advantages of all loss tokens of the step to mean 0 and standard deviation 1."
    )
    gdpo_weights: dict[Name, Number] = key(
        factory=dict, doc="GDPO: weight per named part of the reward; empty takes all parts once, else only these."
    )
    loss: LossName | DottedPath = key(
        "ppo_clip",
        "Policy loss: clipped surrogate (PPO, DAPO), plain policy gradient (reinforce), the same with the ratio "
        "(importance_sampling), ratio of the sequence (gspo, gmpo), clipped weight (cispo), soft gate (sapo), "
        "covariance (clip_cov, kl_cov), divergence mask (dppo_tv, dppo_kl), or square around the old policy (dro).",
    )
    loss_args: dict[Name, Number] = key(
        factory=dict, doc="Your own loss (a dotted path in `algorithm.loss`): its numbers, by name."
    )
    clip_ratio_low: Float = key(
        0.2,
        "ppo_clip, gspo, cispo, clip_cov: lower bound of the ratio is 1 - clip_ratio_low; gmpo: of the log-ratio, "
        "-clip_ratio_low.",
        gt=0,
        le=1,
    )
    clip_ratio_high: Float = key(
        0.2,
        "ppo_clip, gspo, cispo, clip_cov: upper bound of the ratio is 1 + clip_ratio_high; gmpo: of the log-ratio, "
        "clip_ratio_high.",
        gt=0,
    )
    dual_clip: Float | None = key(
        None, "ppo_clip: dual clip constant c (> 1) for negative advantages; null turns it off.", gt=1
    )
    sapo_tau_positive: Float = key(1.0, "sapo: temperature of the gate where the advantage is positive.", gt=0)
    sapo_tau_negative: Float = key(1.05, "sapo: temperature of the gate elsewhere.", gt=0)
    cov_frac: Float = key(
        0.0002,
        "clip_cov, kl_cov: fraction of the step's loss tokens that is held back; at least one token.",
        gt=0,
        le=1,
    )
    cov_min: Float = key(1.0, "clip_cov: tokens are drawn from those whose covariance is above this.")
    cov_max: Float = key(5.0, "clip_cov: tokens are drawn from those whose covariance is below this.")
    cov_kl_coef: Float = key(1.0, "kl_cov: coefficient of the penalty on the chosen tokens.", gt=0)
    dppo_threshold: Float = key(
        0.15, "dppo: largest divergence of a token that may still move away; published: 0.15 (tv), 0.05 (kl).", gt=0
    )
    dro_beta: Float = key(0.05, "dro: weight of the squared log-ratio.", gt=0)
    entropy_coef: Float = key(
        0.0, "Entropy bonus: this times the entropy of each loss token is subtracted from its loss; 0 costs nothing.",
        ge=0,
    )  # fmt: skip
    loss_aggregation: AggregationName = key(
        "token_mean", "How token losses become one number; the denominator is global over ranks and micro-batches."
    )
    loss_norm_tokens: Int | None = key(
        None, "seq_mean_token_sum_norm: its constant divisor; null takes `rollout.max_response_tokens`.", ge=1
    )
    dynamic_sampling: Bool = key(
        False, "Dynamic sampling (DAPO): drop groups of equal rewards (remax: equal to the greedy one), and refill."
    )
    group_filter: Text = key(
        "",
        "Your own filter of finished groups, as `package.module.function`: gives None, or the reason why a group is "
        "not worth a training slot. It is asked after the built-in filters; empty asks nobody.",
    )
    group_filter_args: dict[Name, Number] = key(factory=dict, doc="Its numbers, by name.")
    on_failure: OnFailureConfig = key(
        factory=OnFailureConfig,
        doc="What becomes of responses that went wrong; `response/failures` counts them. An evaluation counts only if "
        "none did.",
    )
    max_filtered_batches_per_step: Int = key(
        64,
        "When a run stops because nothing comes of its groups: more than this many times `trainer.groups_per_step` of "
        "them were filtered (zero variance, or failed rewards) while not one step's groups worked; or so many prompts "
        "in a row were dropped after their retries.",
        ge=1,
    )
    overlong_buffer_tokens: Int = key(
        0, "DAPO overlong reward shaping: penalty grows over the last so many response tokens; 0 turns it off.", ge=0
    )
    overlong_penalty: Float = key(1.0, "Largest overlong penalty.", ge=0)
    mask_truncated: Bool = key(False, "DAPO overlong filtering: truncated answers carry no loss.")
    kl: KlConfig = key(factory=KlConfig, doc="KL to the reference, the first policy or a teacher.")
    correction: CorrectionConfig = key(factory=CorrectionConfig, doc="Off-policy correction.")

    @property
    def uses_critic(self) -> bool:
        return self.advantage_estimator == "gae"

    @property
    def finishes_on_ranks(self) -> bool:
        """Whether advantages need the learner: the values of a critic, or the log-probs of the reference."""
        return self.uses_critic or self.kl.in_reward


DEFAULT_LR_RATIO = 10.0
"""Peak learning rate of the critic over that of the policy, if `lr` is null."""


@section
class CriticConfig:
    path: PathText | None = key(
        None,
        "Hugging Face model directory or hub name that the critic's backbone starts from, with the policy's tokens; "
        "null takes `model.path`. Its output matrix is not used: a value head that starts at 0 is.",
    )
    shared_backbone: Bool = key(
        False,
        "Put the value head on the policy's own hidden states. Both losses then train one model with one optimizer: "
        "no second model in memory, but the two tasks share weights.",
    )
    value_coef: Float = key(
        0.5, "With `shared_backbone`: weight of the value loss beside the policy loss (PPO's c1).", gt=0
    )
    lr: Float | None = key(
        None,
        "Peak learning rate of the critic; null takes 10 times `learner.lr`. It follows `learner.lr_schedule` and "
        "`learner.warmup_steps`.",
        gt=0,
    )
    weight_decay: Float = key(0.01, "AdamW weight decay of the critic (not on norms and biases).", ge=0)
    max_grad_norm: Float = key(1.0, "Gradient norm of the critic is clipped to this.", gt=0)
    warmup_steps: Int = key(
        0,
        "First steps that train the critic alone. The policy is not computed, so they make no version, and its "
        "learning-rate schedule starts after them.",
        ge=0,
    )
    updates_per_step: Int = key(
        1,
        "Optimizer updates of the critic per step, each over the whole batch towards the same returns. The policy "
        "makes one.",
        ge=1,
    )
    value_clip: Float | None = key(
        None,
        "Largest distance that a value may win by moving from where it was when the advantages were computed; null "
        "does not clip. The first update of a step starts there, so only `updates_per_step` > 1 is ever clipped.",
        gt=0,
    )
    cpu_offload: Bool = key(
        False, "Keep the critic's parameters and optimizer state in host memory (FSDP2 CPU offload)."
    )
