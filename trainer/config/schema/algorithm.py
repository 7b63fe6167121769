"""`algorithm`: advantage estimator, policy loss, aggregation and off-policy correction."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.estimators import AdvantageName, GpgScale
from trainer.config.loss_keys import AggregationName, LossName
from trainer.config.schema.correction import CorrectionConfig
from trainer.config.schema.field import key
from trainer.config.schema.kl import KlConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    name: str = key("grpo", "Shown in logs; the parts below define the objective.")
    advantage: AdvantageName | str = key(
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
    advantage_args: dict[str, float] = key(
        factory=dict, doc="Your own estimator (a dotted path in `algorithm.advantage`): its numbers, by name."
    )
    normalize_by_std: bool = key(
        True, "GRPO and pass@k: divide by the group's standard deviation; false with grpo is Dr. GRPO."
    )
    gpg_scale: GpgScale = key(
        "nonzero_rewards",
        "GPG: the factor is all answers of the step over those with a reward other than 0 (the released "
        "implementation, for rewards of 0 and 1), or over those in groups with unequal rewards (the paper's eq. 7).",
    )
    gae_gamma: float = key(
        1.0, "GAE: discount per generated token. Below 1, an early token hardly sees the outcome of a long answer.",
        gt=0, le=1,
    )  # fmt: skip
    gae_lambda: float = key(
        1.0,
        "GAE: 1 takes the return minus the value, which a critic that starts at 0 cannot bias; below 1 trusts the "
        "critic, and fades the outcome by a factor of lambda per token.",
        ge=0,
        le=1,
    )
    whiten_advantages: bool = key(
        True, "GAE: bring the advantages of all loss tokens of the step to mean 0 and standard deviation 1."
    )
    gdpo_weights: dict[str, float] = key(
        factory=dict, doc="GDPO: weight per named part of the reward; empty takes all parts once, else only these."
    )
    loss: LossName | str = key(
        "ppo_clip",
        "Policy loss: clipped surrogate (PPO, DAPO), plain policy gradient (reinforce), the same with the ratio "
        "(importance_sampling), ratio of the sequence (gspo, gmpo), clipped weight (cispo), soft gate (sapo), "
        "covariance (clip_cov, kl_cov), divergence mask (dppo_tv, dppo_kl), or square around the old policy (dro).",
    )
    loss_args: dict[str, float] = key(
        factory=dict, doc="Your own loss (a dotted path in `algorithm.loss`): its numbers, by name."
    )
    clip_low: float = key(
        0.2,
        "ppo_clip, gspo, cispo, clip_cov: lower bound of the ratio is 1 - clip_low; gmpo: of the log-ratio, -clip_low.",
        gt=0,
        le=1,
    )
    clip_high: float = key(
        0.2,
        "ppo_clip, gspo, cispo, clip_cov: upper bound of the ratio is 1 + clip_high; gmpo: of the log-ratio, "
        "clip_high.",
        gt=0,
    )
    clip_dual: float | None = key(
        None, "ppo_clip: dual clip constant c (> 1) for negative advantages; null turns it off.", gt=1
    )
    sapo_tau_positive: float = key(1.0, "sapo: temperature of the gate where the advantage is positive.", gt=0)
    sapo_tau_negative: float = key(1.05, "sapo: temperature of the gate elsewhere.", gt=0)
    cov_frac: float = key(
        0.0002,
        "clip_cov, kl_cov: fraction of the step's loss tokens that is held back; at least one token.",
        gt=0,
        le=1,
    )
    cov_min: float = key(1.0, "clip_cov: tokens are drawn from those whose covariance is above this.")
    cov_max: float = key(5.0, "clip_cov: tokens are drawn from those whose covariance is below this.")
    cov_kl_coef: float = key(1.0, "kl_cov: coefficient of the penalty on the chosen tokens.", gt=0)
    dppo_threshold: float = key(
        0.15, "dppo: largest divergence of a token that may still move away; published: 0.15 (tv), 0.05 (kl).", gt=0
    )
    dro_beta: float = key(0.05, "dro: weight of the squared log-ratio.", gt=0)
    entropy_coef: float = key(
        0.0, "Entropy bonus: this times the entropy of each loss token is subtracted from its loss; 0 costs nothing.",
        ge=0,
    )  # fmt: skip
    aggregation: AggregationName = key(
        "token_mean", "How token losses become one number; the denominator is global over ranks and micro-batches."
    )
    aggregation_norm_tokens: int | None = key(
        None, "seq_mean_token_sum_norm: its constant divisor; null takes `rollout.max_response_tokens`.", ge=1
    )
    filter_zero_variance: bool = key(
        False, "Dynamic sampling (DAPO): drop groups of equal rewards (remax: equal to the greedy one), and refill."
    )
    group_filter: str = key(
        "",
        "Your own filter of finished groups, as `package.module.function`: gives None, or the reason why a group is "
        "not worth a training slot. It is asked after the built-in filters; empty asks nobody.",
    )
    group_filter_args: dict[str, float] = key(factory=dict, doc="Its numbers, by name.")
    max_refills_per_step: int = key(
        64,
        "When a run stops because nothing comes of its groups: more than this many times `trainer.groups_per_step` of "
        "them were filtered (zero variance, or failed rewards) while not one step's groups worked; or so many prompts "
        "in a row were dropped after their retries.",
        ge=1,
    )
    overlong_buffer_tokens: int = key(
        0, "DAPO overlong reward shaping: penalty grows over the last so many response tokens; 0 turns it off.", ge=0
    )
    overlong_penalty: float = key(1.0, "Largest overlong penalty.", ge=0)
    mask_truncated: bool = key(False, "DAPO overlong filtering: truncated answers carry no loss.")
    kl: KlConfig = key(factory=KlConfig, doc="KL to the reference, the first policy or a teacher.")
    correction: CorrectionConfig = key(factory=CorrectionConfig, doc="Off-policy correction.")

    @property
    def uses_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def finishes_on_ranks(self) -> bool:
        """Whether advantages need the learner: the values of a critic, or the log-probs of the reference."""
        return self.uses_critic or self.kl.in_reward
