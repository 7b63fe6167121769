"""The configuration of the objective, and what each loss and advantage estimator needs and reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, TypeVar, cast

from annotated_types import Gt
from pydantic import Field

from rollout.errors import PluginError
from rollout.plugins import load
from trainer.config.field import (
    Bool,
    DottedPath,
    Float,
    Fraction,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PathText,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    section,
)  # fmt: skip
from trainer.errors import ConfigurationError, Problem

OwnFunction = Callable[..., object]
"""Of a user, in place of a built-in one, named by its dotted path: `package.module.function`."""


def is_own(name: str) -> bool:
    """Whether `name` is the dotted path of a user's function; names of built-in functions have no dot."""
    return "." in name


def load_own(path: str, *, key: str, args: Mapping[str, float]) -> OwnFunction:
    """Import the function that `key` (such as "algorithm.loss") names, once, and check that it takes one positional
    argument and the numbers `args` of the key `KEY_args`.

    Raises `ConfigurationError` if it does not import, is not a plain function, or does not take these arguments.
    """
    return _load(path, key, tuple(args))


@cache
def _load(path: str, key: str, names: tuple[str, ...]) -> OwnFunction:
    try:
        function = load(path, what=key)
    except PluginError as error:
        raise _refused(key, path, str(error), "see docs/add_a_loss.md") from error
    if not callable(function) or inspect.iscoroutinefunction(function) or inspect.isclass(function):
        kind = "an async function or a class" if callable(function) else f"an object of type {type(function).__name__}"
        raise _refused(key, path, f"must be a plain function, got {kind}", "name a function, see docs/add_a_loss.md")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # some compiled callables have no signature; the first call shows whether it fits
    try:
        signature.bind(None, **dict.fromkeys(names, 0.0))
    except TypeError as error:
        given = ", ".join(names) if names else "nothing"
        message = f"cannot be called with one argument and the numbers of {key}_args ({given}): {error}"
        raise _refused(key, path, message, f"its signature is {signature}") from error
    return function


def _refused(key: str, path: str, message: str, hint: str) -> ConfigurationError:
    return ConfigurationError([Problem(key=key, value=path, message=message, hint=hint, related=(f"{key}_args",))])


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
    """Every group needs an extra greedy response, whose reward is the baseline."""
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
"""Of a user's estimator that declares none. They promise least: it never sees a single response, and no code relies on
the advantages of a group to depend on that group alone."""

_DECLARED = "estimator_traits"
_Estimator = TypeVar("_Estimator", bound=OwnFunction)


def with_traits(traits: EstimatorTraits) -> Callable[[_Estimator], _Estimator]:
    """A decorator that declares what a user's estimator reads, in place of `OWN_TRAITS`.

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

    Raises `ConfigurationError` if the path does not lead to an estimator.
    """
    advantage = algorithm.advantage_estimator
    if is_own(advantage):
        return declared_traits(load_own(advantage, key="algorithm.advantage_estimator", args=algorithm.advantage_args))
    return ESTIMATORS[cast("AdvantageName", advantage)]


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
    """What one loss reads and contains."""

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
    """Ignores the age of a sample: refused off policy, unless a correction masks or rejects."""
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
        own_bound=("has its own gate", "use null, or algorithm.loss=ppo_clip"),
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
"""A user's loss reads no key of another, and is assumed to contain the ratio of the token."""

SELECTING_LOSSES: tuple[LossName, ...] = tuple(name for name, traits in LOSSES.items() if traits.selects)


def loss_traits(loss: str) -> LossTraits:
    """Of a built-in loss, or of one of the user by its dotted path."""
    return _OWN_LOSS if is_own(loss) else LOSSES[cast("LossName", loss)]


Level = Literal["token", "sequence", "sequence_mean"]
Metric = Literal["ratio", "k1", "k2", "k3", "tv"]
Objective = Literal["bypass", "decoupled", "loglinear"]
OBJECTIVES: Mapping[Objective, str] = {
    "bypass": "engine's log-probs as old policy",
    "decoupled": "learner's log-probs at the start of the step as old policy",
    "loglinear": "old policy interpolated by the age of the token",
}
"""In the words of the line that a run logs; each has its `case` in `trainer.algorithms.corrections`."""


@section
class ClampConfig:
    lower: PositiveFloat | None = None
    """Smallest importance weight; null for no bound."""
    upper: PositiveFloat | None = None
    """Largest importance weight (TIS); null for no bound."""

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@section
class MaskConfig:
    metric: Metric = "ratio"
    """What the bounds apply to: the ratio r itself, the KL estimates k1 = -log r, k2 = (log r)^2 / 2 and k3 = r - 1 -
    log r, or tv = |r - 1| / 2, the total variation."""
    lower: Float | None = None
    """Tokens with less of the metric carry no loss; null for no bound."""
    upper: Float | None = None
    """Tokens with more of the metric carry no loss (MIS, IcePop); null for no bound."""

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@section
class RejectConfig:
    level: Level = "sequence_mean"
    """What must be within the bounds: the metric of every single token, its sum over the response (for `ratio` the
    product), or its mean (for `ratio` the geometric mean)."""
    metric: Metric = "ratio"
    """What the bounds apply to, as in `mask`."""
    lower: Float | None = None
    """Responses with less of the metric carry no loss; null for no bound."""
    upper: Float | None = None
    """Responses with more of the metric carry no loss; null for no bound."""

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@section
class CorrectionConfig:
    objective: Objective = "bypass"
    """Old policy of the loss. `bypass`: the policy that sampled. `decoupled`: the learner's at the start of the step (a
    loss with its own bound needs several updates per batch), with its ratio to the sampling policy as weight of the
    token. `loglinear`: the
    same, but interpolated between the two by the age of the token (A-3PO)."""
    level: Level = "token"
    """Ratio that `clamp` and `mask` use, and that `decoupled` and `loglinear` use as weight: of the token, of the
    response (product), or its geometric mean. A clamp with `bypass` needs the one that the loss contains."""
    clamp: ClampConfig = Field(default_factory=ClampConfig)
    """Keep importance weights within bounds."""
    mask: MaskConfig = Field(default_factory=MaskConfig)
    """Tokens outside the bounds carry no loss."""
    reject: RejectConfig = Field(default_factory=RejectConfig)
    """Responses outside the bounds carry no loss at all."""


KlEstimator = Literal["k1", "k2", "k3", "k1_straight_through", "k3_straight_through"]


@section
class KlConfig:
    coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence of the policy to the reference; 0 keeps no reference."""
    reference_model: PathText | None = None
    """The reference: a model directory or hub name, with the policy's tokens (a teacher); null is the initial
    policy."""
    apply_to: Literal["loss", "reward", "advantage"] = "loss"
    """`loss` adds the KL of the policy being trained to every token's loss (GRPO); `reward` subtracts the KL of the
    sampling policy from every token's reward, so that the advantages see it (PPO for RLHF); `advantage` subtracts it
    from the token's own advantage, with any estimator (on-policy distillation)."""
    estimator: KlEstimator = "k3"
    """From one sampled token, with d = log policy - log reference: k1 = d (not in the loss; the only one in the
    advantage), k2 = d^2 / 2, k3 = exp(-d) - 1 + d; straight-through forms (only in the loss) have the gradient of k2,
    that of the KL."""

    @property
    def in_loss(self) -> bool:
        return self.coef > 0 and self.apply_to == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coef > 0 and self.apply_to == "reward"

    @property
    def in_advantage(self) -> bool:
        return self.coef > 0 and self.apply_to == "advantage"


@section
class OnFailureConfig:
    timeout: Literal["score", "zero", "drop"] = "drop"
    """A response over `rollout.request_timeout_s`, or whose agent is over `task.agent_timeout_s`: `score` scores what
    was generated, as a truncated response; `zero` sets its reward to 0; `drop` excludes it from training, which favours
    fast responses. Without a generated token it is dropped."""
    agent_error: Literal["score", "zero", "drop"] = "drop"
    """A trajectory whose agent or environment raised or broke its contract: as with `timeout`."""
    reward_timeout: Literal["zero", "drop"] = "drop"
    """A response whose reward took longer than `task.reward.timeout_s`: `zero` sets its reward to 0, right where only a
    response can make the reward hang; `drop` excludes it from training, right where a judge may be down."""


@section
class AlgorithmConfig:
    name: str = "grpo"
    """Shown in logs; the keys below define the objective."""
    advantage_estimator: AdvantageName | DottedPath = "grpo"
    """Advantage estimator: the reward against the group's mean (grpo), the mean of the others (rloo), or a
    length-weighted mean (opo); only the single best response of a group (pass_at_k); the plain reward (reinforce); the
    reward normalised over the step's tokens (reinforce_pp), after subtracting the group's mean (reinforce_pp_baseline);
    the group's mean with a factor for responses that teach nothing (gpg); each reward part normalised in its group
    (gdpo); per token from the values of a critic (gae); the reward of an extra greedy response per group (remax); 0,
    regardless of the reward (zero), where only a teacher teaches. With several turns reinforce and reinforce_pp credit
    a token with the rewards from its turn on; the group estimators add them up."""
    advantage_args: dict[Name, Number] = Field(default_factory=dict)
    """Your own estimator (a dotted path in `algorithm.advantage_estimator`): its numbers, by name."""
    normalize_by_std: Bool = True
    """GRPO and pass@k: divide by the group's standard deviation; false with grpo is Dr. GRPO."""
    gpg_scale: GpgScale = "nonzero_rewards"
    """GPG: the factor is the number of responses of the step over that of responses with a reward other than 0 (the
    released code, for rewards of 0 and 1), or over that of responses in groups with unequal rewards (the paper's eq.
    7)."""
    gae_gamma: PositiveFraction = 1.0
    """GAE: discount per generated token. Below 1, an early token hardly sees the outcome of a long response."""
    gae_lambda: Fraction = 1.0
    """GAE: 1 takes the return minus the value, which a critic that starts at 0 cannot bias; below 1 relies on the
    critic, and fades the outcome by a factor of lambda per token."""
    whiten_advantages: Bool = True
    """GAE: normalise the advantages of all loss tokens of the step to mean 0 and standard deviation 1."""
    gdpo_weights: dict[Name, Number] = Field(default_factory=dict)
    """GDPO: weight per named part of the reward; empty takes all parts with weight 1, else only these. A part that a
    response lacks counts as 0."""
    loss: LossName | DottedPath = "ppo_clip"
    """Policy loss: clipped surrogate (PPO, DAPO), plain policy gradient (reinforce), the same with the ratio
    (importance_sampling), ratio of the sequence (gspo, gmpo), clipped weight (cispo), soft gate (sapo), covariance
    (clip_cov, kl_cov), divergence mask (dppo_tv, dppo_kl), or square around the old policy (dro)."""
    loss_args: dict[Name, Number] = Field(default_factory=dict)
    """Your own loss (a dotted path in `algorithm.loss`): its numbers, by name."""
    clip_ratio_low: PositiveFraction = 0.2
    """ppo_clip, gspo, cispo, clip_cov: 1 minus the lower bound of the ratio; gmpo: minus that of the log-ratio."""
    clip_ratio_high: PositiveFloat = 0.2
    """ppo_clip, gspo, cispo, clip_cov: the upper bound of the ratio minus 1; gmpo: that of the log-ratio."""
    dual_clip: Annotated[Float, Gt(1)] | None = None
    """ppo_clip: dual clip constant c (> 1) for negative advantages; null turns it off."""
    sapo_tau_positive: PositiveFloat = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    sapo_tau_negative: PositiveFloat = 1.05
    """sapo: temperature of the gate elsewhere."""
    cov_frac: PositiveFraction = 0.0002
    """clip_cov, kl_cov: fraction of the step's loss tokens that is selected; at least one token."""
    cov_min: Float = 1.0
    """clip_cov: tokens are drawn from those whose covariance is above this."""
    cov_max: Float = 5.0
    """clip_cov: tokens are drawn from those whose covariance is below this."""
    cov_kl_coef: PositiveFloat = 1.0
    """kl_cov: coefficient of the penalty on the selected tokens."""
    dppo_threshold: PositiveFloat = 0.15
    """dppo: largest divergence of a token that may still move away; published: 0.15 (tv), 0.05 (kl)."""
    dro_beta: PositiveFloat = 0.05
    """dro: weight of the squared log-ratio."""
    entropy_coef: NonNegativeFloat = 0.0
    """Entropy bonus: this times the entropy of each loss token is subtracted from its loss; 0 costs nothing."""
    loss_aggregation: AggregationName = "token_mean"
    """How token losses become one number; the denominator is global over ranks and micro-batches."""
    loss_norm_tokens: PositiveInt | None = None
    """seq_mean_token_sum_norm: its constant divisor; null takes `rollout.max_response_tokens`."""
    dynamic_sampling: Bool = False
    """Dynamic sampling (DAPO): drop groups of equal rewards (remax: equal to the greedy one), and replace them."""
    group_filter: str = ""
    """Your own filter of finished groups, as `package.module.function`: returns None, or the reason why a group is not
    worth a training slot. It is called after the built-in filters; empty means none."""
    group_filter_args: dict[Name, Number] = Field(default_factory=dict)
    """Its numbers, by name."""
    on_failure: OnFailureConfig = Field(default_factory=OnFailureConfig)
    """How failed responses are handled; `response/failures` counts them. An evaluation is valid only if none failed."""
    max_filtered_batches_per_step: PositiveInt = 64
    """A run stops when more than this many times `trainer.groups_per_step` groups were filtered without completing a
    step, or as many consecutive prompts were dropped after their retries."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """DAPO overlong reward shaping: the penalty grows over the last this many response tokens; 0 turns it off."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Largest overlong penalty."""
    mask_truncated: Bool = False
    """DAPO overlong filtering: truncated responses carry no loss."""
    kl: KlConfig = Field(default_factory=KlConfig)
    """KL to the reference, the initial policy or a teacher."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    """Off-policy correction."""

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
    path: PathText | None = None
    """Hugging Face model directory or hub name that the critic's backbone starts from, with the policy's tokens; null
    takes `model.path`. Its output matrix is not used: a value head that starts at 0 is."""
    shared_backbone: Bool = False
    """Put the value head on the policy's own hidden states. Both losses then train one model with one optimizer: no
    second model in memory, but the two tasks share weights."""
    value_coef: PositiveFloat = 0.5
    """With `shared_backbone`: weight of the value loss relative to the policy loss (PPO's c1)."""
    lr: PositiveFloat | None = None
    """Peak learning rate of the critic, on the schedule of `learner`; null takes 10 times `learner.lr`."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay of the critic (not on norms and biases)."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm of the critic is clipped to this."""
    warmup_steps: NonNegativeInt = 0
    """First steps that train only the critic. They make no version; the policy's schedule starts after them."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates of the critic for every update of the policy, each over the same (mini-)batch with the same
    returns."""
    value_clip: PositiveFloat | None = None
    """Largest distance that a value may gain by moving from where it was when the advantages were computed; null does
    not clip. The first update of a step starts there, so only later ones are ever clipped."""
    cpu_offload: Bool = False
    """Keep the critic's parameters and optimizer state in host memory (FSDP2 CPU offload)."""
