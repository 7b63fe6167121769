"""The optimizer step."""

from __future__ import annotations

from trainer.telemetry.metric_rows.row import row

LEARNER = (
    row(
        "learner/loss",
        "loss",
        "What the policy is trained on: its loss after the correction, with the entropy bonus and the KL penalty "
        "where they are in the loss; summed or averaged over the whole step by algorithm.aggregation.",
        "near 0; finite",
    ),
    row("learner/skipped_steps", "0 or 1", "Whether the step was skipped, since a gradient is not finite.", "0"),
    row("learner/grad_norm", "norm", "Gradient norm before clipping.", "no growth over 10x"),
    row("learner/lr", "1", "Learning rate of the step.", "follows the schedule"),
    row(
        "learner/ratio_mean",
        "ratio",
        "Mean importance ratio, policy over the old policy that algorithm.correction.objective chooses; of tokens, "
        "also where the loss takes the ratio of a sequence.",
        "0.95 to 1.05",
    ),
    row("learner/ratio_max", "ratio", "Largest importance ratio of a token.", "< 10"),
    row(
        "learner/clip_low_frac",
        "fraction",
        "Tokens with a negative advantage whose gradient the loss cut (cispo: tokens whose weight it raised).",
        "< 0.1; with gspo often more",
    ),
    row(
        "learner/clip_high_frac",
        "fraction",
        "Tokens with a positive advantage whose gradient the loss cut (cispo: tokens whose weight it lowered).",
        "< 0.1; with gspo often more",
    ),
    row("learner/clip_dual_frac", "fraction", "Tokens whose gradient the dual clip cut.", "< 0.01"),
    row("learner/entropy", "nats/token", "Entropy of the policy on the trained tokens.", "falls slowly, not to 0"),
    row("learner/kl_behaviour", "nats/token", "KL of the sampling policy to the trained one (k3).", "< 0.05"),
    row(
        "learner/kl_reference",
        "nats/token",
        "KL of the policy to the reference (k3): the first policy, or a teacher; only with algorithm.kl.coef > 0.",
        "rises slowly, then levels off; falls to a teacher",
    ),
    row(
        "learner/mismatch_engine",
        "nats/token",
        "Mean distance of the log-probs of learner and engine on tokens of age 0: same weights, other kernels.",
        "< 0.01 in float32, < 0.05 in bfloat16",
    ),
    row("learner/mismatch_engine_kl", "nats/token", "KL of engine to learner on tokens of age 0 (k3).", "< 0.002"),
    row(
        "learner/mismatch_stale",
        "nats/token",
        "The same distance on older tokens: what was learned since, on top of the engine's mismatch.",
        "a few times mismatch_engine",
    ),
    row("learner/mismatch_stale_kl", "nats/token", "KL of engine to learner on older tokens (k3).", "< 0.05"),
    row(
        "learner/correction_weight_mean",
        "weight",
        "Mean importance weight of a token after the correction; 0 on masked and rejected ones.",
        "near 1",
    ),
    row("learner/correction_weight_max", "weight", "Largest of them.", "<= the upper bound, if there is one"),
    row(
        "learner/correction_ess_frac",
        "fraction",
        "Effective sample size: equally weighted tokens that would tell as much, over all tokens.",
        "> 0.8",
    ),
    row("learner/correction_clamped_frac", "fraction", "Tokens whose weight was clamped.", "< 0.05"),
    row("learner/correction_masked_frac", "fraction", "Tokens masked.", "< 0.05"),
    row("learner/correction_rejected_frac", "fraction", "Tokens of rejected answers.", "< 0.1"),
    row("learner/value_loss", "loss", "Half the mean squared error of the critic's values.", "falls"),
    row("learner/value_mean", "reward", "Mean value of the trained tokens.", "near return_mean"),
    row("learner/return_mean", "reward", "Mean return that the critic learns.", "rises"),
    row(
        "learner/value_explained_variance",
        "fraction",
        "Part of the variance of returns that the values explain; absent where all returns are equal.",
        "0 at the start, then rises; below 0 it harms",
    ),
    row(
        "learner/value_clip_frac",
        "fraction",
        "Tokens whose value gradient critic.value_clip cut, over all updates of the step.",
        "< 0.2",
    ),
    row("learner/critic_grad_norm", "norm", "Critic's gradient norm before clipping, mean of its updates.", "steady"),
    row(
        "learner/critic_skipped_updates",
        "updates",
        "Later updates of the critic (critic.updates_per_step > 1) left out, since a gradient is not finite.",
        "0",
    ),
    row("learner/critic_lr", "1", "Learning rate of the critic.", "follows the schedule"),
    row(
        "learner/num_tokens",
        "tokens",
        "Tokens of the answers in learner/num_samples, their prompts included.",
        "steady",
    ),
    row("learner/num_loss_tokens", "tokens", "Tokens with loss.", "steady"),
    row(
        "learner/num_samples",
        "answers",
        "Answers of the step that are trained: all but response/untrained.",
        "groups_per_step x group_size",
    ),
    row(
        "learner/num_sequences",
        "sequences",
        "Token sequences of these answers; more than answers where an agent begins anew.",
        "learner/num_samples",
    ),
    row("learner/num_micro_batches", "micro-batches", "Per rank.", "steady"),
    row("learner/reference_s", "s", "Forward passes of the reference or teacher.", "about forward, by its size"),
    row("learner/critic_s", "s", "Forward and backward passes and updates of the critic.", "about forward + backward"),
    row("learner/advantages_s", "s", "Advantages that are finished on the learner without a critic.", "near 0"),
    row("learner/forward_s", "s", "Forward passes.", "steady"),
    row("learner/backward_s", "s", "Backward passes.", "about 2x forward"),
    row("learner/optimizer_s", "s", "Gradient reduction, clipping and the optimizer.", "small"),
    row("learner/step_s", "s", "The whole optimizer step, without waiting for data and sync.", "<= perf/step_s"),
    row("learner/imbalance", "ratio", "Tokens of the fullest rank over the mean of all ranks.", "< 1.1"),
)
