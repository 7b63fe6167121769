"""Every metric of a record of metrics.jsonl: name, unit, meaning, healthy range. docs/metrics.md shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class MetricInfo(NamedTuple):
    """`name` may end in `/*`, which is any one word."""

    name: str
    unit: str
    meaning: str
    healthy: str


Rows = tuple[tuple[str, str, str, str], ...]
"""Fields of `MetricInfo`."""

# fmt: off
ENGINES: Rows = (
    ("sync/pack_s", "s", "Slowest learner rank: casting and packing its shard into the arena.", "steady"),
    ("sync/seal_s", "s", "Slowest learner rank: digest of the packed bytes, concurrent with training.",
     "< sync/pull_s"),
    ("sync/pin_s", "s", "From the start of a sync until every learner rank has sealed and pinned it.",
     "~ sync/seal_s"),
    ("sync/pull_s", "s", "Slowest engine worker: reading the new weights.", "steady"),
    ("sync/pull_gb_per_s", "GB/s", "Rate of the slowest engine worker's pull.", "> 80% of what the link can do"),
    ("sync/pull_s/*", "s", "Slowest pull from one learner rank; several run at a time.", "similar for all ranks"),
    ("sync/attest_s", "s", "Checking digests of the received bytes.", "< sync/pull_s"),
    ("sync/drain_s", "s", "From the request to pause an engine until its current step ended.", "one decode step"),
    ("sync/pause_s", "s", "Longest pause of any engine for a commit.", "< 5% of perf/step_s"),
    ("sync/commit_s", "s", "Slowest engine worker: putting the new weights in place.", "< sync/pause_s"),
    ("sync/resume_s", "s", "Slowest engine: from the new weights in place to the end of its pause.", "short"),
    ("sync/end_to_end_s", "s", "From the start of the sync until the last engine is live.", "< perf/step_s"),
    ("sync/bytes", "bytes", "Weights moved per version.", "constant"),
    ("sync/skipped_bytes", "bytes", "Of these, not read again: they are what they were in the version before.",
     "0 unless parts are frozen"),
    ("sync/num_runs", "runs", "Contiguous copies per version.", "constant"),
    ("sync/num_retries", "retries", "Repeated pulls.", "0"),
    ("sync/num_stalls", "sources", "Reads from another engine that stalled; the learner sent the rest.", "0"),
    ("sync/replicas_live", "replicas", "Engines with the new version.", "rollout.num_replicas"),
    ("sync/replicas_skipped", "replicas", "Engines left out of this sync: lost, or leased by an evaluation.",
     "0; 1 while an evaluation runs"),
    ("sync/version_lag", "versions", "Newest version minus the oldest one that an engine still uses.", "<= 1"),
    ("sync/counter/*", "count", "Allocations, registrations, sockets and similar since the epoch opened.",
     "flat after version 1, except for answered requests and superseded versions"),
    ("fleet/engine_restarts", "engines", "Restarts of lost engines since the run began.", "0"),
    ("fleet/worker_restarts", "workers", "Restarts of lost rollout workers since the run began.", "0"),
    ("engine/queued", "requests", "Requests waiting for room on an engine.", "0 with rollout.max_concurrency=null"),
    ("engine/repacked_requests", "requests", "Requests moved to empty their engine, since the rollout workers started; "
     "with rollout.repack_below.", "a few per freed engine; 0 without the key"),
    ("engine/repacked_tokens", "tokens", "Tokens of these moves, prompts included, which the other engines recomputed.",
     "< 20% of the generated tokens"),
    ("engine/migrated_requests", "requests", "Requests moved because their engine was lost, since the workers started.",
     "0"),
    ("engine/migrated_tokens", "tokens", "Response tokens that these requests kept.", "0"),
    ("engine/limit/*", "requests", "Current limit of concurrent requests to the engine.", "steady"),
    ("engine/in_flight/*", "requests", "Requests of training and evaluation at the engine.", "near engine/limit"),
    ("engine/running/*", "requests", "Requests in the engine's batch.", "<= rollout.max_num_seqs"),
    ("engine/waiting/*", "requests", "Requests waiting inside the engine; they count as running unless it reports its "
     "load.", "0, except for moments"),
    ("engine/kv_usage_frac/*", "fraction", "KV cache held by running requests; with rollout.engine_stats or "
     "concurrency=adaptive.", "0.5 .. 0.95"),
    ("engine/preemptions/*", "requests", "Requests whose cache was preempted since the engine started; with "
     "rollout.engine_stats or concurrency=adaptive.", "grows rarely"),
)

LEARNER: Rows = (
    ("learner/loss", "loss", "Training loss of the policy: after the correction, with the entropy bonus and the KL "
     "penalty where they are part of the loss; aggregated by algorithm.loss_aggregation, mean of the step's updates.",
     "near 0; finite"),
    ("learner/skipped_steps", "0 or 1", "Whether the step was skipped because a gradient was not finite.", "0"),
    ("learner/num_updates", "updates", "Optimizer updates of the policy in the step; only with several per batch, as "
     "the next five.", "updates_per_batch x num_mini_batches"),
    ("learner/skipped_updates", "updates", "Those skipped because a gradient was not finite.", "0"),
    ("learner/first_ratio_mean", "ratio", "learner/ratio_mean of the first update alone, whose policy is the version "
     "before the step.", "near 1"),
    ("learner/first_ratio_max", "ratio", "learner/ratio_max of the first update.", "< 10"),
    ("learner/first_clip_low_frac", "fraction", "learner/clip_low_frac of the first update.",
     "below learner/clip_low_frac"),
    ("learner/first_clip_high_frac", "fraction", "learner/clip_high_frac of the first update.",
     "below learner/clip_high_frac"),
    ("learner/grad_norm", "norm", "Gradient norm before clipping, mean of the step's updates.", "no growth over 10x"),
    ("learner/lr", "1", "Learning rate of the step.", "follows the schedule"),
    ("learner/ratio_mean", "ratio", "Mean importance ratio of tokens: policy over the old policy chosen by "
     "algorithm.correction.objective; per token also where the loss uses sequence ratios.", "0.95 to 1.05"),
    ("learner/ratio_max", "ratio", "Largest importance ratio of a token.", "< 10"),
    ("learner/clip_low_frac", "fraction", "Tokens with negative advantage whose gradient was clipped (cispo: whose "
     "weight was raised).", "< 0.1; often more with gspo"),
    ("learner/clip_high_frac", "fraction", "Tokens with positive advantage whose gradient was clipped (cispo: whose "
     "weight was lowered).", "< 0.1; often more with gspo"),
    ("learner/clip_dual_frac", "fraction", "Tokens whose gradient was clipped by the dual clip.", "< 0.01"),
    ("learner/entropy", "nats/token", "Entropy of the policy on the trained tokens.", "falls slowly, not to 0"),
    ("learner/kl_behavior", "nats/token", "KL of the sampling policy to the trained one (k3).", "< 0.05"),
    ("learner/kl_reference", "nats/token", "KL of the policy to the reference (k3): the first policy, or a teacher; "
     "only with algorithm.kl.coef > 0.", "rises slowly, then levels off; falls to a teacher"),
    ("mismatch/fresh", "nats/token", "Mean distance of the log-probs of learner and engine on tokens of age 0: same "
     "weights, other kernels.", "< 0.01 in float32, < 0.05 in bfloat16"),
    ("mismatch/fresh_kl", "nats/token", "KL of engine to learner on tokens of age 0 (k3).", "< 0.002"),
    ("mismatch/stale", "nats/token", "The same on older tokens: policy change since sampling plus engine mismatch.",
     "a few times mismatch_engine"),
    ("mismatch/stale_kl", "nats/token", "KL of engine to learner on older tokens (k3).", "< 0.05"),
    ("learner/correction_weight_mean", "weight", "Mean importance weight of a token after the correction; 0 on masked "
     "and rejected ones.", "near 1"),
    ("learner/correction_weight_max", "weight", "Largest of these weights.", "<= the upper bound, if set"),
    ("learner/correction_ess_frac", "fraction", "Effective sample size: number of equally weighted tokens with the "
     "same information, over all tokens.", "> 0.8"),
    ("learner/correction_clamped_frac", "fraction", "Tokens with clamped weight.", "< 0.05"),
    ("learner/correction_masked_frac", "fraction", "Tokens masked.", "< 0.05"),
    ("learner/correction_rejected_frac", "fraction", "Tokens of rejected responses.", "< 0.1"),
    ("learner/value_loss", "loss", "Half the mean squared error of the critic's values.", "falls"),
    ("learner/value_mean", "reward", "Mean value of the trained tokens.", "near return_mean"),
    ("learner/return_mean", "reward", "Mean return that the critic learns.", "rises"),
    ("learner/value_explained_variance", "fraction", "Explained variance of the returns; absent where all returns are "
     "equal.", "0 at the start, then rises; below 0 the critic harms"),
    ("learner/value_clip_frac", "fraction", "Tokens whose value gradient was clipped by critic.value_clip, over all "
     "updates of the step.", "< 0.2"),
    ("learner/critic_grad_norm", "norm", "Critic's gradient norm before clipping, mean of its updates.", "steady"),
    ("learner/critic_skipped_updates", "updates", "Critic updates after the first (critic.updates_per_step > 1) "
     "skipped because a gradient was not finite.", "0"),
    ("learner/critic_lr", "1", "Learning rate of the critic.", "follows the schedule"),
    ("learner/num_tokens", "tokens", "Tokens of the responses in learner/num_samples, prompts included.", "steady"),
    ("learner/shared_tokens_frac", "fraction", "Of learner/num_tokens, those of prompts that were computed "
     "with another response (learner.share_prefix); absent if none.", "steady"),
    ("learner/num_loss_tokens", "tokens", "Tokens with loss.", "steady"),
    ("learner/num_samples", "responses", "Trained responses of the step: all but response/excluded.",
     "groups_per_step x group_size"),
    ("learner/num_sequences", "sequences", "Token sequences of these responses; more than responses where an agent "
     "restarts its context.", "learner/num_samples"),
    ("learner/num_micro_batches", "micro-batches", "Per rank.", "steady"),
    ("learner/proximal_s", "s", "Forward passes for the log-probs before the first update, of mini-batches that it "
     "does not visit; only where algorithm.correction.objective needs them.", "below forward"),
    ("learner/reference_s", "s", "Forward passes of the reference or teacher.", "about forward, by its size"),
    ("learner/critic_s", "s", "Forward and backward passes and updates of the critic.", "about forward + backward"),
    ("learner/advantages_s", "s", "Advantages computed on the learner without a critic.", "near 0"),
    ("learner/forward_s", "s", "Forward passes.", "steady"),
    ("learner/backward_s", "s", "Backward passes.", "about 2x forward"),
    ("learner/optimizer_s", "s", "Gradient reduction, clipping and the optimizer.", "small"),
    ("learner/step_s", "s", "The whole optimizer step, without waiting for data and sync.", "<= perf/step_s"),
    ("learner/imbalance", "ratio", "Work of the slowest rank, micro-batch by micro-batch, over the mean of all ranks: "
     "operations as perf/mfu counts them, tokens where those are not known.", "< 1.03"),
    ("learner/time_imbalance", "ratio", "Measured: forward and backward seconds of the slowest rank over the mean of "
     "all ranks. Sharded ranks wait for each other inside these passes, so it shows a slow device or host rather than "
     "uneven work, which learner/imbalance does. Absent with one rank.", "< 1.05"),
)

TRAINING: Rows = (
    ("step", "steps", "Optimizer steps so far, resumes included; the line describes the last one.", "+1 per line"),
    ("version", "versions", "Policy version after this step; one that trains the critic alone, or is skipped, "
     "produces none.", "+1 per line"),
    ("time_s", "s", "Since the process started; restarts at 0 after a resume.", "grows within a process"),
    ("reward/mean", "reward", "Mean reward of the step's responses, before shaping and loss filters.", "rises"),
    ("reward/std", "reward", "Standard deviation of these rewards.", "> 0"),
    ("reward/turns_mean", "reward", "Part of reward/mean given by an environment for turns; absent without turn "
     "rewards.", "depends on the environment"),
    ("reward/greedy_mean", "reward", "Mean reward of the greedy responses of remax, which no other metric of rewards, "
     "lengths or ages includes.", "rises; near reward/mean or above"),
    ("reward/part/*", "reward", "Mean of one named part of the reward.", "depends on the reward"),
    ("reward/zero_variance_frac", "fraction", "Groups whose responses all have the same reward (remax: that of the "
     "greedy one); they give no signal to estimators that compare responses.", "< 0.8; 0 with dynamic sampling"),
    ("response/tokens_mean", "tokens", "Mean length of the step's responses.", "no steady drift to the limit"),
    ("response/tokens_max", "tokens", "Longest response of the step.", "<= rollout.max_response_tokens"),
    ("response/truncated_frac", "fraction", "Responses that reached a token limit.", "< 0.1"),
    ("agent/turns_mean", "turns", "Generated turns per response of the step. Absent where every response is one turn "
     "and the agent does not count tool calls.", "> 1 once tools are used"),
    ("agent/tool_calls_mean", "calls", "Tool calls per response of the step, failed and malformed ones included, "
     "truncated ones not. Only with an agent that counts its calls, such as tool_agent.", "> 0; at 0 the policy never "
     "uses a tool"),
    ("agent/tool_errors", "calls", "Tool calls of the step that returned an error to the policy: malformed, unknown "
     "tool, raised, or too slow.", "falls"),
    ("response/failed_frac", "fraction", "Responses without a reward since the previous step because the reward "
     "function or agent failed, those of untrained groups included.", "0"),
    ("response/failures/*", "responses", "Responses since the previous step that went wrong, whatever "
     "algorithm.on_failure made of them, by kind: timeout, agent_error, reward_timeout or reward_error. Absent at 0.",
     "0"),
    ("agent/hanging_threads", "threads", "Threads of rollout workers that still run calls of tools or agents that took "
     "too long, because a thread cannot be ended. At 1,024 per worker every further call fails. Absent at 0.", "0"),
    ("eval/accuracy", "reward", "Mean reward of the held-out responses: an accuracy where rewards are 0 and 1. Like "
     "all of eval/ except eval/failed_runs, only on lines where an evaluation ended, for the newest one; "
     "evaluations.jsonl has all.", "rises"),
    ("eval/accuracy_stderr", "reward", "Standard error of eval/accuracy, over prompts, because responses to one prompt "
     "are not independent. Absent with one prompt.", "below the gain that you look for"),
    ("eval/accuracy/*", "reward", "The same for prompts scored by this reward, with task.reward.column.", "rises"),
    ("eval/num_prompts/*", "prompts", "Held-out prompts scored by this reward.", "constant"),
    ("eval/reward/part/*", "reward", "Like reward/part, for the held-out responses.", "depends on the reward"),
    ("eval/pass_at/*", "fraction", "Pass@k: held-out prompts of which one of k responses reaches "
     "trainer.eval_pass_threshold, an unbiased estimate from eval/num_samples responses each.", "rises"),
    ("eval/num_samples", "responses", "Responses per held-out prompt.", "trainer.eval_samples"),
    ("eval/tokens_mean", "tokens", "Mean length of the held-out responses.", "no steady drift to the limit"),
    ("eval/failed_runs", "evaluations", "Failed evaluations so far: a response could not be scored, or a timeout; "
     "log.txt and evaluations.jsonl have the reasons.", "0"),
    ("eval/version", "versions", "Policy version that was evaluated.", "<= version"),
    ("eval/num_prompts", "prompts", "Held-out prompts of the evaluation.", "task.eval_size"),
    ("eval/truncated_frac", "fraction", "Held-out responses that reached a token limit.", "< 0.1"),
    ("eval/time_s", "s", "Duration of the evaluation.", "short compared with eval_every steps"),
    ("staleness/mean", "versions", "Mean age of the trained tokens: version of the step minus version that sampled the "
     "token.", "<= S"),
    ("staleness/max", "versions", "Largest age of a trained token.", "<= mode.max_staleness, always"),
    ("staleness/p50", "versions", "Median age of the trained tokens.", "<= S"),
    ("staleness/p90", "versions", "90th percentile of the age of the trained tokens.", "<= S"),
    ("staleness/age_frac/*", "fraction", "Trained tokens of this age: 0, 1, ... S; the fractions add up to 1.",
     "0 above S"),
    ("staleness/group_mean", "versions", "Mean age of the trained groups, from their admission.", "<= S"),
    ("staleness/group_max", "versions", "Largest age of a trained group.", "<= mode.max_staleness, always"),
    ("discarded_tokens", "tokens", "Finished tokens discarded for their age since the process started.", "0, always"),
    ("discarded/filtered_tokens", "tokens", "Tokens of filtered groups since the last line.", "few"),
    ("discarded/failed_tokens", "tokens", "All tokens generated for responses without a usable reward, since the last "
     "line.", "0"),
    ("discarded/unused_tokens", "tokens", "Tokens that agents generated but used in no turn of a scored response, "
     "since the last line.", "0, unless agents generate more than they use"),
    ("response/excluded/*", "responses", "Responses of the step without loss, by reason: failed, truncated, "
     "no_generated_tokens, no_peer_in_group (the only scored one of its group). Absent at 0.", "few"),
    ("discarded/masked_tokens", "tokens", "Generated tokens of scored responses of the step without loss, e.g. of "
     "truncated ones.", "few"),
    ("discarded/retried_s", "s", "Group-seconds of failed attempts that were retried, since the last line.", "0"),
    ("discarded/dropped_s", "s", "The same for last attempts, after which the prompt was dropped.", "0"),
    ("discarded/failed_attempt_tokens", "tokens", "Tokens of failed and cancelled attempts since the workers started.",
     "0"),
    ("length_bias/ks", "fraction", "KS distance between the lengths of generated and of trained token sequences, over "
     "the latest 256 groups or more.", "< 0.2"),
    ("length_bias/early_ks", "fraction", "KS distance between the lengths of the groups trained first and of all "
     "groups admitted under the same version; over the latest 16 versions whose groups are all trained. 0 if one step "
     "trains all of them.", "< 0.2"),
    ("length_bias/early_length_ratio", "ratio", "Mean length of the groups trained first over that of all: below 1, "
     "short responses are trained earlier.", "> 0.8"),
)

TIMING: Rows = (
    ("perf/step_s", "s", "Time between the ends of the previous and this step.", "steady"),
    ("perf/rollout_tokens_per_s", "tokens/s", "Generated tokens of the groups finished since the last step, per "
     "second, all engines, greedy baselines included. A group counts in full when it ends, so short steps alternate "
     "between 0 and peaks.", "steady over several lines"),
    ("perf/train_tokens_per_s", "tokens/s", "Tokens trained (prompts included) per second of learner/step_s.",
     "steady"),
    ("perf/tokens_per_s", "tokens/s", "Tokens trained per second since the last step: the pace of the run.", "steady"),
    ("perf/learner_busy_frac", "fraction", "Utilization of the learner: learner/step_s over perf/step_s.", "> 0.8"),
    ("perf/engines_busy_frac", "fraction", "Utilization of the engines: fraction of time with at least one request.",
     "near 1"),
    ("perf/groups_running", "groups", "Time average of buffer/num_running.", "steady"),
    ("perf/mfu", "fraction", "Model FLOPs utilization of the learner in learner/step_s.", "> 0.3 on accelerators"),
    ("time/wait_for_batch_s", "s", "The learner was idle: no batch was ready.", "small compared with perf/step_s"),
    ("time/wait_for_eval_s", "s", "Part of time/wait_for_batch_s during an evaluation; with one engine, syncs wait for "
     "it.", "0 on most lines"),
    ("time/wait_for_sync_s", "s", "The learner was idle during a weight sync.", "< 5% of perf/step_s"),
    ("time/engines_idle_s", "s", "Time without a request, mean over all engines, lost ones included. Sampled once a "
     "second: for a shorter step it is the mean of that second. Pauses are in sync/pause_s.",
     "< 5% of perf/step_s, except with S = 0"),
    ("time/backpressure_s", "s", "Admission was blocked because all slots were taken; counted when the wait ends.",
     "any, if engines are busy"),
    ("queue/pending_s", "s", "From admission until a worker got the group; mean of the step's groups.", "0"),
    ("queue/pending_s_max", "s", "Longest of these.", "0"),
    ("queue/rollout_s", "s", "From then until the last reward: waiting for an engine and a reward process, generation, "
     "scoring. Mean of the step's groups.", "steady"),
    ("queue/rollout_s_max", "s", "Longest of these.", "<= S + 1 steps"),
    ("queue/engine_slot_s", "s", "Part of it in which a response waited in its worker for room at an engine "
     "(rollout.max_concurrency, drained engines), all turns and moves; mean of the step's responses.",
     "small compared with queue/rollout_s"),
    ("queue/engine_slot_s_max", "s", "Longest of these.", "well below rollout.request_timeout_s"),
    ("queue/ready_s", "s", "From the end of a group until its step; mean of the step's groups.", "< S steps"),
    ("queue/ready_s_max", "s", "Longest of these.", "<= S + 1 steps"),
    ("devices/sleep_s", "s", "Shared devices: engines ended their requests and freed their memory.", "< 2 s"),
    ("devices/onload_s", "s", "Shared devices: slowest rank moved its memory back from the host.", "bytes / 50 GB/s"),
    ("devices/offload_s", "s", "Shared devices: slowest rank moved its memory to the host.", "bytes / 50 GB/s"),
    ("devices/onload_bytes", "bytes", "Shared devices: weights and moments that moved, all ranks.", "constant"),
    ("devices/free_frac", "fraction", "Shared devices: free fraction of the fullest device while neither side uses it: "
     "what is left for engines.", "> rollout.gpu_memory_utilization"),
)

BUFFER: Rows = (
    ("buffer/num_slots", "groups", "Open slots: how far generation may run ahead.", "steady; <= (S+1) x B"),
    ("buffer/num_slots_used", "groups", "Taken slots.", "near num_slots"),
    ("buffer/num_queued", "groups", "Admitted, not yet sent to a worker.", "small"),
    ("buffer/num_running", "groups", "At a worker: waiting, generating or being scored.", "> 0"),
    ("buffer/num_ready", "groups", "Finished, waiting for a step.", "> 0 if the learner must not wait"),
    ("buffer/num_training", "groups", "Taken by a step whose weights are not live yet.", "<= num_slots"),
    ("buffer/oldest_age", "versions", "Age of the oldest outstanding group at the next step.", "<= S"),
    ("buffer/version", "versions", "Version live on the engines, as known to the buffer.", "grows"),
    ("buffer/admitted", "groups", "Prompts admitted since the start of the run.", "grows"),
    ("buffer/finished", "groups", "Groups finished since the start of the run, like all that follow except the waits.",
     "grows"),
    ("buffer/trained", "groups", "Trained groups whose weights are live.", "grows"),
    ("buffer/filtered/*", "groups", "Groups filtered, by reason.", "few"),
    ("buffer/failed", "groups", "Failed attempts, retried or not.", "0"),
    ("buffer/retried", "groups", "Attempts after a failure.", "0"),
    ("buffer/dropped/*", "groups", "Groups dropped after their last retry, by error.", "0"),
    ("buffer/replaced", "groups", "Filtered and dropped groups, each replaced by another prompt.", "few"),
    ("buffer/discarded_tokens", "tokens", "Same as discarded_tokens.", "0, always"),
    ("buffer/batch_wait_s", "s", "Wait for groups of the next step since the process started, whether or not the "
     "learner was idle.", "any"),
    ("buffer/oldest_wait_s", "s", "Part of it spent waiting for old groups while enough others were ready.", "any"),
    ("buffer/slot_wait_s", "s", "Wait for a free slot since the process started.", "any"),
    ("data/epoch", "epochs", "Epoch of the next prompt to be admitted, from 0.", "grows"),
    ("data/difficulty_mean", "as the column", "Mean difficulty of the step's prompts; with a curriculum.", "rises"),
    ("data/pass_rate_mean", "fraction", "Mean of the latest pass rates of all prompts that have one; with the "
     "pass-rate filter, like the next two.", "rises"),
    ("data/prompts_excluded", "prompts", "Prompts currently outside task.pass_rate_min .. pass_rate_max.",
     "well below all"),
    ("data/skipped/*", "prompts", "Times that a prompt was skipped since the start of the run, by reason: too_hard, "
     "too_easy.", "grows"),
    ("telemetry/sink_errors", "errors", "Failed writes of sinks since the process started, those of sinks that could "
     "not be opened included; log.txt has the reason.", "0"),
    ("telemetry/trajectory_errors", "errors", "Groups and evaluations that could not be recorded since the process "
     "started.", "0"),
    ("telemetry/trajectories_skipped", "records", "Groups, failed attempts and evaluations that were skipped: "
     "telemetry.max_trajectories_gib was reached, or the disk was 64 records behind.", "0"),
    ("telemetry/trace_dropped", "events", "Trace events dropped since the process started: over the limit of 2 "
     "million, or refused by the disk.", "0"),
)
# fmt: on

SECTIONS: dict[str, Rows] = {
    "What is learned, from what": TRAINING,
    "Pace and waits": TIMING,
    "Weight sync and engines": ENGINES,
    "Learner": LEARNER,
    "Buffer, data and telemetry": BUFFER,
}
"""By the heading in docs/metrics.md."""

METRICS = tuple(MetricInfo(*row) for section in SECTIONS.values() for row in section)

REQUIRED: tuple[str, ...] = (
    "step", "version", "time_s", "reward/mean", "staleness/max", "staleness/mean", "discarded_tokens",
    "perf/rollout_tokens_per_s", "perf/train_tokens_per_s", "time/wait_for_batch_s", "time/wait_for_sync_s",
    "time/engines_idle_s", "time/backpressure_s",
    "sync/version_lag",
)  # fmt: skip
"""On every line. `eval/accuracy` and `eval/version` are on the lines where an evaluation ended."""

RENAMED: Mapping[str, str] = {
    "buffer/forced_wait_s": "buffer/oldest_wait_s",
    "buffer/num_taken": "buffer/num_training",
    "buffer/refilled": "buffer/replaced",
    "buffer/take_wait_s": "buffer/batch_wait_s",
    "data/resting": "data/prompts_excluded",
    "discarded/attempt_tokens": "discarded/failed_attempt_tokens",
    "discarded/excluded_tokens": "discarded/masked_tokens",
    "discarded/given_up_tokens": "discarded/unused_tokens",
    "engine/held": "engine/queued",
    "engine/moved_requests": "engine/repacked_requests",
    "engine/moved_tokens": "engine/repacked_tokens",
    "engine/rescued_requests": "engine/migrated_requests",
    "engine/rescued_tokens": "engine/migrated_tokens",
    "learner/kl_behaviour": "learner/kl_behavior",
    "learner/mismatch_engine": "mismatch/fresh",
    "learner/mismatch_engine_kl": "mismatch/fresh_kl",
    "learner/mismatch_stale": "mismatch/stale",
    "learner/mismatch_stale_kl": "mismatch/stale_kl",
    "queue/admitted_to_claimed_s": "queue/pending_s",
    "queue/claimed_to_finished_s": "queue/rollout_s",
    "queue/finished_to_taken_s": "queue/ready_s",
    "queue/for_engine_s": "queue/engine_slot_s",
    "response/untrained": "response/excluded",
    "sync/lease_s": "sync/pin_s",
    "telemetry/trajectories_left_out": "telemetry/trajectories_skipped",
    "wait/engines_idle_s": "time/engines_idle_s",
    "wait/learner_for_data_s": "time/wait_for_batch_s",
    "wait/learner_for_evaluation_s": "time/wait_for_eval_s",
    "wait/learner_for_sync_s": "time/wait_for_sync_s",
    "wait/producer_for_slots_s": "time/backpressure_s",
}
"""Earlier name of a metric or a family -> its name now, for records of earlier runs."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def current_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of any age, under today's names."""
    return {_current_name(name): value for name, value in record.items()}


def _current_name(name: str) -> str:
    base, suffix = (name[:-4], "_max") if name.endswith("_max") else (name, "")
    if base in RENAMED:
        return RENAMED[base] + suffix
    family, _, member = name.rpartition("/")
    return f"{RENAMED[family]}/{member}" if family in RENAMED else name


def find_row(name: str) -> MetricInfo | None:
    """The row of a metric; None for an unknown one. `eval/NAME/...` of a set has that of `eval/...`."""
    found = _BY_NAME.get(name) or _BY_NAME.get(f"{name.rpartition('/')[0]}/*")
    of_set = name.split("/", 2)
    return find_row(f"eval/{of_set[2]}") if found is None and of_set[0] == "eval" and len(of_set) == 3 else found


_INTRO = """\
# Metrics

<!-- Generated from trainer/telemetry/metrics.py by `python scripts/generate_docs.py`; do not edit. -->

`metrics.jsonl` in the run directory holds one JSON object per line and optimizer step; the same numbers go to
TensorBoard (`tensorboard --logdir RUN_DIR/tb`), and with `telemetry.wandb` to
[Weights & Biases](quickstart.md#weights--biases).

- A metric without data in a step is absent from its line. `null` means that a NaN or an infinity was computed; the
  first time, log.txt has which.
- Means are over all ranks and micro-batches of the step, weighted by what they count, and are divided once. In a step
  without a trained token, means of tokens in `learner/` and `staleness/` are 0.
- Times in `learner/` are of the slowest rank, each for itself: together they can be more than `learner/step_s`.
- `sync/` is about the newest version that was live when the step ended, usually the one before the step's own; several
  short steps may show the same one. A step that left the policy as it was has `sync/version_lag` alone.
- A run that is resumed appends. Lines of steps after the checkpoint are cut first, because those steps run again.
- A line is on disk as soon as it is written. A crash can at most leave one incomplete line at the end, which the next
  process cuts.
- `perf/mfu` counts the policy's forward and backward (6 operations per weight and token, 4 where it is frozen, logits
  of trained tokens only, causal attention; nothing that is recomputed) over `learner/step_s` (optimizer, reference and
  critic included), all learner devices and `device.peak_tflops`. Absent where one is not known, as on a CPU.
- `eval/NAME/...` is the metric `eval/...` of the set `task.eval_sets.NAME`; `eval/...` itself is of `task.eval_path`.
- S is `mode.max_staleness`. A name that ends in `/*` is a family.

"""


def metrics_markdown() -> str:
    """The page docs/metrics.md."""
    required = ", ".join(f"`{name}`" for name in REQUIRED)
    tables = "\n".join(_table(title, rows) for title, rows in SECTIONS.items())
    return f"{_INTRO}On every line: {required}. Where an evaluation ended: `eval/accuracy`, `eval/version`.\n\n{tables}"


def _table(title: str, rows: Rows) -> str:
    lines = [f"| `{name}` | {unit} | {meaning} | {healthy} |" for name, unit, meaning, healthy in rows]
    return "\n".join([f"## {title}", "", "| Name | Unit | Meaning | Healthy |", "|---|---|---|---|", *lines, ""])
