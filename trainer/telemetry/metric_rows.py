"""Every metric that a line of metrics.jsonl may hold: name, unit, meaning, healthy range. docs/metrics.md shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """`name` may end in `/*`: any one word stands there."""

    name: str
    unit: str
    meaning: str
    healthy: str


def _row(name: str, unit: str, meaning: str, healthy: str) -> MetricInfo:
    return MetricInfo(name=name, unit=unit, meaning=meaning, healthy=healthy)


METRICS: tuple[MetricInfo, ...] = (
    _row("step", "steps", "Optimizer steps done, resumes included; this line is about the last one.", "+1 per line"),
    _row("version", "versions", "Policy version that this step made.", "= step"),
    _row("time_s", "s", "Since the process began.", "grows"),
    _row(
        "reward/mean", "reward", "Mean reward of the step's answers, before shaping and filters of the loss.", "rises"
    ),
    _row("reward/std", "reward", "Standard deviation of those rewards over all answers.", "> 0"),
    _row(
        "reward/turns_mean",
        "reward",
        "Part of reward/mean that an environment gave for turns; only on lines where it gave any.",
        "depends on the environment",
    ),
    _row(
        "reward/greedy_mean",
        "reward",
        "Mean reward of the greedy answers that remax compares with; they count in no other metric of rewards, lengths "
        "or ages.",
        "rises; near reward/mean or above",
    ),
    _row("reward/part/*", "reward", "Mean of one named part of the reward.", "depends on the reward"),
    _row(
        "reward/zero_variance_frac",
        "fraction",
        "Groups whose answers all have the same reward (with remax: that of the greedy one); they teach nothing where "
        "answers are compared.",
        "< 0.8; 0 with dynamic sampling",
    ),
    _row("response/tokens_mean", "tokens", "Mean length of the step's answers.", "no steady drift to the limit"),
    _row("response/tokens_max", "tokens", "Longest answer of the step.", "<= rollout.max_response_tokens"),
    _row("response/truncated_frac", "fraction", "Answers that ran into a token limit.", "< 0.1"),
    _row("response/failed_frac", "fraction", "Answers without a usable reward.", "0"),
    _row(
        "eval/accuracy",
        "reward",
        "Mean reward of the held-out answers: an accuracy where rewards are 0 and 1. As all of eval/ but "
        "eval/failed_runs, only on the lines where an evaluation ended, and of the newest that did; evaluations.jsonl "
        "has them all.",
        "rises",
    ),
    _row(
        "eval/accuracy_stderr",
        "reward",
        "Standard error of eval/accuracy; prompts count, not answers, which are not independent. Absent with one.",
        "below the gain that you look for",
    ),
    _row("eval/accuracy/*", "reward", "The same of prompts that this reward judges, with task.reward.column.", "rises"),
    _row("eval/num_prompts/*", "prompts", "Held-out prompts that this reward judges.", "constant"),
    _row("eval/reward/part/*", "reward", "As reward/part, of the held-out answers.", "depends on the reward"),
    _row(
        "eval/pass_at/*",
        "fraction",
        "Held-out prompts of which one of so many answers reaches trainer.eval_pass_reward, estimated unbiased from "
        "eval/num_samples answers each.",
        "rises",
    ),
    _row("eval/num_samples", "answers", "Answers per held-out prompt.", "trainer.eval_samples"),
    _row("eval/tokens_mean", "tokens", "Mean length of the held-out answers.", "no steady drift to the limit"),
    _row(
        "eval/failed_runs",
        "evaluations",
        "Evaluations so far that gave no number, because an answer could not be scored or time was up; log.txt and "
        "evaluations.jsonl have the reasons.",
        "0",
    ),
    _row("eval/version", "versions", "Policy version that was evaluated.", "<= version"),
    _row("eval/num_prompts", "prompts", "Held-out prompts of the evaluation.", "task.eval_size"),
    _row("eval/truncated_frac", "fraction", "Held-out answers that ran into a token limit.", "< 0.1"),
    _row("eval/time_s", "s", "Duration of the evaluation.", "short beside eval_every steps"),
    _row(
        "staleness/mean", "versions", "Mean age of the trained tokens: step's version minus sampling version.", "<= S"
    ),
    _row("staleness/max", "versions", "Largest age of a trained token.", "<= mode.max_staleness, always"),
    _row("staleness/p50", "versions", "Median age of the trained tokens.", "<= S"),
    _row("staleness/p90", "versions", "90th percentile of the age of the trained tokens.", "<= S"),
    _row("staleness/age_frac/*", "fraction", "Trained tokens of this age: 0, 1, ... S; they add up to 1.", "0 above S"),
    _row("staleness/group_mean", "versions", "Mean age of the trained groups, from their admission.", "<= S"),
    _row("staleness/group_max", "versions", "Largest age of a trained group.", "<= mode.max_staleness, always"),
    _row("discarded_tokens", "tokens", "Finished tokens thrown away for age since the start of the run.", "0, always"),
    _row("discarded/filtered_tokens", "tokens", "Tokens of groups that a filter replaced, since the last line.", "few"),
    _row(
        "discarded/failed_tokens",
        "tokens",
        "Tokens of answers without a usable reward, and those that agent loops gave up, since the last line.",
        "0, unless loops ask for more than they use",
    ),
    _row(
        "response/untrained/*",
        "answers",
        "Of the step's answers, those that carry no loss, by reason: failed, truncated, no_generated_tokens, "
        "no_peer_in_group (the only one of its group with a reward). Absent at 0.",
        "few",
    ),
    _row(
        "discarded/excluded_tokens",
        "tokens",
        "Generated tokens of the step's judged answers that carry no loss, e.g. of truncated ones.",
        "few",
    ),
    _row("discarded/retried_s", "s", "Group-seconds of failed attempts that were retried, since the last line.", "0"),
    _row("discarded/dropped_s", "s", "The same of last attempts, after which the prompt was given up.", "0"),
    _row("discarded/attempt_tokens", "tokens", "Of failed and cancelled attempts, since the workers began.", "0"),
    _row("length_bias/ks", "fraction", "KS distance between the lengths of generated and of trained answers.", "< 0.2"),
    _row(
        "length_bias/early_ks",
        "fraction",
        "Of groups admitted under one version: KS distance between the lengths of those trained first and of all. 0 if "
        "one step trains them whole.",
        "< 0.2",
    ),
    _row(
        "length_bias/early_length_ratio",
        "ratio",
        "Mean length of those trained first over that of all: below 1, short answers are trained earlier.",
        "> 0.8",
    ),
    _row("perf/step_s", "s", "Time between the ends of this step and of the one before.", "steady"),
    _row(
        "perf/rollout_tokens_per_s",
        "tokens/s",
        "Tokens generated since the last step, per second, all engines, greedy baselines included.",
        "steady",
    ),
    _row("perf/train_tokens_per_s", "tokens/s", "Tokens trained (prompts included) per second of the step.", "steady"),
    _row("perf/tokens_per_s", "tokens/s", "Tokens trained per second since the last step: the run's pace.", "steady"),
    _row("perf/learner_busy_frac", "fraction", "Utilisation of the learner: learner/step_s over perf/step_s.", "> 0.8"),
    _row(
        "perf/engines_busy_frac",
        "fraction",
        "Utilisation of the engines: share of their time in which they had a request inside.",
        "near 1",
    ),
    _row("perf/groups_running", "groups", "Groups with a worker, as buffer/num_running; mean over the time.", "steady"),
    _row("perf/mfu", "fraction", "Model-flops utilisation of the learner in learner/step_s.", "> 0.3 on accelerators"),
    _row("wait/learner_for_data_s", "s", "The learner stood still: no batch was ready.", "small beside perf/step_s"),
    _row(
        "wait/learner_for_evaluation_s",
        "s",
        "Part of wait/learner_for_data_s in which an evaluation ran; with one engine, syncs wait for that.",
        "0 on most lines",
    ),
    _row("wait/learner_for_sync_s", "s", "The learner stood still: weights were on their way.", "< 5% of perf/step_s"),
    _row(
        "wait/engines_idle_s",
        "s",
        "Time that an engine had no request inside, mean over all engines, lost ones included. Engines measure it, and "
        "are asked once a second: of a step shorter than that it is the mean of a second. Pauses are in sync/pause_s.",
        "< 5% of perf/step_s, but with S = 0",
    ),
    _row(
        "wait/producer_for_slots_s",
        "s",
        "Admission waited because all slots were taken; counted where the wait ends.",
        "engines busy all the same",
    ),
    _row("queue/admitted_to_claimed_s", "s", "From admission until a worker got it, mean of the step's groups.", "0"),
    _row("queue/admitted_to_claimed_s_max", "s", "Longest of them.", "0"),
    _row(
        "queue/claimed_to_finished_s",
        "s",
        "From then until its last reward: waits for room at an engine and for a free reward process, generation, "
        "rewards. Mean of the step's groups.",
        "steady",
    ),
    _row("queue/claimed_to_finished_s_max", "s", "Longest of them.", "<= S + 1 steps"),
    _row(
        "queue/for_engine_s",
        "s",
        "Part of it in which an answer waited in its worker for room at an engine (rollout.max_concurrency, engines at "
        "rest), all its turns and moves; mean of the step's answers.",
        "small beside queue/claimed_to_finished_s",
    ),
    _row("queue/for_engine_s_max", "s", "Longest of them.", "well below rollout.request_timeout_s"),
    _row("queue/finished_to_taken_s", "s", "From the end of a group until its step, mean of its groups.", "< S steps"),
    _row("queue/finished_to_taken_s_max", "s", "Longest of them.", "<= S + 1 steps"),
    _row("devices/sleep_s", "s", "Shared devices: engines ended their requests and gave their memory back.", "< 2 s"),
    _row(
        "devices/onload_s", "s", "Shared devices: slowest rank took its memory back from the host.", "bytes / 50 GB/s"
    ),
    _row("devices/offload_s", "s", "Shared devices: slowest rank moved its memory to the host.", "bytes / 50 GB/s"),
    _row("devices/onload_bytes", "bytes", "Shared devices: weights and moments that moved, all ranks.", "constant"),
    _row(
        "devices/free_frac",
        "fraction",
        "Shared devices: free share of the fullest device when neither side is on it: what engines find.",
        "> rollout.gpu_memory_utilization",
    ),
    _row("sync/pack_s", "s", "Slowest learner rank: casting and packing its shard into the arena.", "steady"),
    _row("sync/seal_s", "s", "Slowest learner rank: digest of the packed bytes, beside training.", "< sync/pull_s"),
    _row("sync/lease_s", "s", "Slowest engine worker: from the request to the first byte.", "~ sync/seal_s"),
    _row("sync/pull_s", "s", "Slowest engine worker: reading the new weights.", "steady"),
    _row("sync/pull_gb_per_s", "GB/s", "Rate of the slowest engine worker's pull.", "> 80% of what the link can do"),
    _row("sync/pull_s/*", "s", "Slowest pull from one learner rank.", "alike for all ranks"),
    _row("sync/attest_s", "s", "Checking digests of what arrived.", "< sync/pull_s"),
    _row("sync/drain_s", "s", "From asking an engine to pause until the step under way had ended.", "one decode step"),
    _row("sync/pause_s", "s", "Longest time that any engine stood still for a commit.", "< 5% of perf/step_s"),
    _row("sync/commit_s", "s", "Slowest engine worker: putting the new weights in place.", "< sync/pause_s"),
    _row("sync/resume_s", "s", "Slowest engine: the end of its pause, after the weights were in place.", "short"),
    _row("sync/end_to_end_s", "s", "From when the sync begins until the last engine is live.", "< perf/step_s"),
    _row("sync/bytes", "bytes", "Weights moved per version.", "constant"),
    _row("sync/num_runs", "runs", "Contiguous copies per version.", "constant"),
    _row("sync/num_retries", "retries", "Repeated pulls.", "0"),
    _row("sync/num_stalls", "sources", "Reads from another engine that fell silent; the learner gave the rest.", "0"),
    _row("engine/held", "requests", "Requests that wait for room on an engine.", "0 with a fixed concurrency of null"),
    _row(
        "engine/moved_requests",
        "requests",
        "Moves of a request so that its engine is free, since the rollout workers began; with rollout.repack_below.",
        "a few per freed engine; 0 without the key",
    ),
    _row(
        "engine/moved_tokens",
        "tokens",
        "Tokens of these moves, prompts included, which the other engines computed again.",
        "< 20% of the generated tokens",
    ),
    _row("engine/rescued_requests", "requests", "Sent on when their engine was lost, since the workers began.", "0"),
    _row("engine/rescued_tokens", "tokens", "Tokens of answers that these had and kept.", "0"),
    _row("engine/limit/*", "requests", "Most requests that the engine is sent at once, now.", "steady"),
    _row("engine/in_flight/*", "requests", "Requests of training that the engine has.", "near engine/limit"),
    _row("engine/running/*", "requests", "Requests in the engine's batch.", "<= rollout.max_num_seqs"),
    _row(
        "engine/waiting/*",
        "requests",
        "Requests that wait inside the engine; they count as running unless it reports its load.",
        "0, but for a moment",
    ),
    _row(
        "engine/kv_usage_frac/*",
        "fraction",
        "KV cache that running requests hold; with rollout.report_load or concurrency=adaptive.",
        "0.5 .. 0.95",
    ),
    _row(
        "engine/preemptions/*",
        "requests",
        "Requests that lost their cache to others since the engine began; with rollout.report_load or "
        "concurrency=adaptive.",
        "grows rarely",
    ),
    _row("sync/replicas_live", "replicas", "Engines with the new version.", "rollout.num_replicas"),
    _row(
        "sync/replicas_skipped",
        "replicas",
        "Engines left out of this sync: lost, or leased by an evaluation.",
        "0; 1 while an evaluation runs",
    ),
    _row(
        "sync/version_lag", "versions", "Newest version minus the oldest that an engine still generates with.", "<= 1"
    ),
    _row(
        "sync/counter/*",
        "count",
        "Allocations, registrations, sockets and the like since the epoch opened.",
        "flat after version 1, but for answered requests and superseded versions",
    ),
    _row("learner/loss", "loss", "Policy loss, over the global number of tokens.", "near 0; finite"),
    _row("learner/grad_norm", "norm", "Gradient norm before clipping.", "no growth over 10x"),
    _row("learner/lr", "1", "Learning rate of the step.", "follows the schedule"),
    _row(
        "learner/ratio_mean",
        "ratio",
        "Mean importance ratio, policy over the old policy that algorithm.correction.objective chooses.",
        "0.95 to 1.05",
    ),
    _row("learner/ratio_max", "ratio", "Largest importance ratio of a token.", "< 10"),
    _row(
        "learner/clip_low_frac",
        "fraction",
        "Tokens with a negative advantage whose gradient the loss cut (cispo: tokens whose weight it raised).",
        "< 0.1; with gspo often more",
    ),
    _row(
        "learner/clip_high_frac",
        "fraction",
        "Tokens with a positive advantage whose gradient the loss cut (cispo: tokens whose weight it lowered).",
        "< 0.1; with gspo often more",
    ),
    _row("learner/clip_dual_frac", "fraction", "Tokens whose gradient the dual clip cut.", "< 0.01"),
    _row("learner/entropy", "nats/token", "Entropy of the policy on the trained tokens.", "falls slowly, not to 0"),
    _row("learner/kl_behaviour", "nats/token", "KL of the sampling policy to the trained one (k3).", "< 0.05"),
    _row(
        "learner/kl_reference",
        "nats/token",
        "KL of the policy to the one that the run began with (k3); only with algorithm.kl.coef > 0.",
        "rises slowly, then levels off",
    ),
    _row(
        "learner/mismatch_engine",
        "nats/token",
        "Mean distance of the log-probs of learner and engine on tokens of age 0: same weights, other kernels.",
        "< 0.01 in float32, < 0.05 in bfloat16",
    ),
    _row("learner/mismatch_engine_kl", "nats/token", "KL of engine to learner on tokens of age 0 (k3).", "< 0.002"),
    _row(
        "learner/mismatch_stale",
        "nats/token",
        "The same distance on older tokens: what was learned since, on top of the engine's mismatch.",
        "a few times mismatch_engine",
    ),
    _row("learner/mismatch_stale_kl", "nats/token", "KL of engine to learner on older tokens (k3).", "< 0.05"),
    _row(
        "learner/correction_weight_mean",
        "weight",
        "Mean importance weight of a token after the correction; 0 on masked and rejected ones.",
        "near 1",
    ),
    _row("learner/correction_weight_max", "weight", "Largest of them.", "<= the upper bound, if there is one"),
    _row(
        "learner/correction_ess_frac",
        "fraction",
        "Effective sample size: equally weighted tokens that would tell as much, over all tokens.",
        "> 0.8",
    ),
    _row("learner/correction_clamped_frac", "fraction", "Tokens whose weight was clamped.", "< 0.05"),
    _row("learner/correction_masked_frac", "fraction", "Tokens masked.", "< 0.05"),
    _row("learner/correction_rejected_frac", "fraction", "Tokens of rejected answers.", "< 0.1"),
    _row("learner/value_loss", "loss", "Half the mean squared error of the critic's values.", "falls"),
    _row("learner/value_mean", "reward", "Mean value of the trained tokens.", "near return_mean"),
    _row("learner/return_mean", "reward", "Mean return that the critic learns.", "rises"),
    _row(
        "learner/value_explained_variance",
        "fraction",
        "Part of the variance of returns that the values explain; absent where all returns are equal.",
        "0 at the start, then rises; below 0 it harms",
    ),
    _row(
        "learner/value_clip_frac",
        "fraction",
        "Tokens whose value gradient critic.value_clip cut, over all updates of the step.",
        "< 0.2",
    ),
    _row("learner/critic_grad_norm", "norm", "Critic's gradient norm before clipping, mean of its updates.", "steady"),
    _row("learner/critic_lr", "1", "Learning rate of the critic.", "follows the schedule"),
    _row("learner/num_tokens", "tokens", "Tokens of the step, prompts included.", "steady"),
    _row("learner/num_loss_tokens", "tokens", "Tokens with loss.", "steady"),
    _row("learner/num_samples", "answers", "Answers of the step.", "groups_per_step x group_size"),
    _row("learner/num_micro_batches", "micro-batches", "Per rank.", "steady"),
    _row("learner/reference_s", "s", "Forward passes of the reference policy.", "about forward"),
    _row("learner/critic_s", "s", "Forward and backward passes and updates of the critic.", "about forward + backward"),
    _row("learner/advantages_s", "s", "Advantages that are finished on the learner without a critic.", "near 0"),
    _row("learner/forward_s", "s", "Forward passes.", "steady"),
    _row("learner/backward_s", "s", "Backward passes.", "about 2x forward"),
    _row("learner/optimizer_s", "s", "Gradient reduction, clipping and the optimizer.", "small"),
    _row("learner/step_s", "s", "The whole optimizer step, as the learner sees it.", "<= perf/step_s"),
    _row("learner/imbalance", "ratio", "Tokens of the fullest rank over the mean of all ranks.", "< 1.1"),
    _row("buffer/num_slots", "groups", "Slots open: generation may run so far ahead.", "steady; <= (S+1) x B"),
    _row("buffer/num_slots_used", "groups", "Slots taken.", "near num_slots"),
    _row("buffer/num_queued", "groups", "Admitted, not yet sent to a worker.", "small"),
    _row("buffer/num_running", "groups", "With a worker: waiting there, generated or rewarded.", "> 0"),
    _row("buffer/num_ready", "groups", "Finished, waiting for a step.", "> 0 if the learner must not wait"),
    _row("buffer/num_taken", "groups", "Taken by a step whose weights are not live yet.", "<= num_slots"),
    _row("buffer/oldest_age", "versions", "Age at the next step of the oldest group outstanding.", "<= S"),
    _row("buffer/version", "versions", "Version that is live on the engines, as the buffer sees it.", "grows"),
    _row("buffer/admitted", "groups", "Prompts admitted since the start of the run.", "grows"),
    _row("buffer/finished", "groups", "Groups that finished.", "grows"),
    _row("buffer/trained", "groups", "Groups trained, with weights live.", "grows"),
    _row("buffer/filtered/*", "groups", "Groups filtered, by reason.", "few"),
    _row("buffer/failed", "groups", "Failed attempts, retried or not.", "0"),
    _row("buffer/retried", "groups", "Attempts after a failure.", "0"),
    _row("buffer/dropped/*", "groups", "Groups given up after their last retry, by error.", "0"),
    _row("buffer/refilled", "groups", "Filtered and dropped groups, each replaced by one more prompt.", "few"),
    _row("buffer/discarded_tokens", "tokens", "As discarded_tokens.", "0, always"),
    _row("buffer/take_wait_s", "s", "Total wait for groups of the next step, the learner being idle or not.", "any"),
    _row("buffer/forced_wait_s", "s", "Part of it spent on old groups while enough others were ready.", "any"),
    _row("buffer/slot_wait_s", "s", "Total wait for a free slot.", "any"),
    _row("data/epoch", "epochs", "Epoch of the prompt that is admitted next, from 0.", "grows"),
    _row("data/difficulty_mean", "as the column", "Mean difficulty of the step's prompts; with a curriculum.", "rises"),
    _row(
        "data/pass_rate_mean",
        "fraction",
        "Mean of the newest pass rates of all prompts that have one; with the pass-rate filter, as the next two.",
        "rises",
    ),
    _row("data/resting", "prompts", "Prompts outside task.pass_rate_min .. pass_rate_max, now.", "well below all"),
    _row(
        "data/skipped/*",
        "prompts",
        "Turns of a prompt that were passed over since the start of the run: too_hard, too_easy.",
        "grows",
    ),
    _row("telemetry/sink_errors", "errors", "Failed writes of metrics so far; log.txt has the reason.", "0"),
    _row("telemetry/trajectory_errors", "errors", "Groups and evaluations that could not be recorded.", "0"),
    _row(
        "telemetry/trajectories_left_out",
        "records",
        "Groups, failed attempts and evaluations that were not recorded since telemetry.trajectories_gib was reached.",
        "0",
    ),
    _row("telemetry/trace_dropped", "events", "Trace events left out.", "0"),
)
