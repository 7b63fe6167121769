"""How fast a run goes, and who waits for whom."""

from __future__ import annotations

from trainer.telemetry.metric_rows.row import row

PACE = (
    row("perf/step_s", "s", "Time between the ends of this step and of the one before.", "steady"),
    row(
        "perf/rollout_tokens_per_s",
        "tokens/s",
        "Generated tokens of the groups that came back since the last step, per second, all engines, greedy baselines"
        " included. Groups count whole, where they end: steps shorter than a group have 0 beside peaks.",
        "steady over several lines",
    ),
    row(
        "perf/train_tokens_per_s",
        "tokens/s",
        "Tokens trained (prompts included) per second of learner/step_s.",
        "steady",
    ),
    row("perf/tokens_per_s", "tokens/s", "Tokens trained per second since the last step: the run's pace.", "steady"),
    row("perf/learner_busy_frac", "fraction", "Utilisation of the learner: learner/step_s over perf/step_s.", "> 0.8"),
    row(
        "perf/engines_busy_frac",
        "fraction",
        "Utilisation of the engines: share of their time in which they had a request inside.",
        "near 1",
    ),
    row("perf/groups_running", "groups", "Groups with a worker, as buffer/num_running; mean over the time.", "steady"),
    row("perf/mfu", "fraction", "Model-flops utilisation of the learner in learner/step_s.", "> 0.3 on accelerators"),
    row("wait/learner_for_data_s", "s", "The learner stood still: no batch was ready.", "small beside perf/step_s"),
    row(
        "wait/learner_for_evaluation_s",
        "s",
        "Part of wait/learner_for_data_s in which an evaluation ran; with one engine, syncs wait for that.",
        "0 on most lines",
    ),
    row("wait/learner_for_sync_s", "s", "The learner stood still: weights were on their way.", "< 5% of perf/step_s"),
    row(
        "wait/engines_idle_s",
        "s",
        "Time that an engine had no request inside, mean over all engines, lost ones included. Engines measure it, and "
        "are asked once a second: of a step shorter than that it is the mean of a second. Pauses are in sync/pause_s.",
        "< 5% of perf/step_s, but with S = 0",
    ),
    row(
        "wait/producer_for_slots_s",
        "s",
        "Admission waited because all slots were taken; counted where the wait ends.",
        "engines busy all the same",
    ),
    row("queue/admitted_to_claimed_s", "s", "From admission until a worker got it, mean of the step's groups.", "0"),
    row("queue/admitted_to_claimed_s_max", "s", "Longest of them.", "0"),
    row(
        "queue/claimed_to_finished_s",
        "s",
        "From then until its last reward: waits for room at an engine and for a free reward process, generation, "
        "rewards. Mean of the step's groups.",
        "steady",
    ),
    row("queue/claimed_to_finished_s_max", "s", "Longest of them.", "<= S + 1 steps"),
    row(
        "queue/for_engine_s",
        "s",
        "Part of it in which an answer waited in its worker for room at an engine (rollout.max_concurrency, engines at "
        "rest), all its turns and moves; mean of the step's answers.",
        "small beside queue/claimed_to_finished_s",
    ),
    row("queue/for_engine_s_max", "s", "Longest of them.", "well below rollout.request_timeout_s"),
    row("queue/finished_to_taken_s", "s", "From the end of a group until its step, mean of its groups.", "< S steps"),
    row("queue/finished_to_taken_s_max", "s", "Longest of them.", "<= S + 1 steps"),
    row("devices/sleep_s", "s", "Shared devices: engines ended their requests and gave their memory back.", "< 2 s"),
    row("devices/onload_s", "s", "Shared devices: slowest rank took its memory back from the host.", "bytes / 50 GB/s"),
    row("devices/offload_s", "s", "Shared devices: slowest rank moved its memory to the host.", "bytes / 50 GB/s"),
    row("devices/onload_bytes", "bytes", "Shared devices: weights and moments that moved, all ranks.", "constant"),
    row(
        "devices/free_frac",
        "fraction",
        "Shared devices: free share of the fullest device when neither side is on it: what engines find.",
        "> rollout.gpu_memory_utilization",
    ),
)
