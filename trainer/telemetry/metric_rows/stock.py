"""What lies in the buffer, what prompts come, and what was not written."""

from __future__ import annotations

from trainer.telemetry.metric_rows.row import row

STOCK = (
    row("buffer/num_slots", "groups", "Slots open: generation may run so far ahead.", "steady; <= (S+1) x B"),
    row("buffer/num_slots_used", "groups", "Slots taken.", "near num_slots"),
    row("buffer/num_queued", "groups", "Admitted, not yet sent to a worker.", "small"),
    row("buffer/num_running", "groups", "With a worker: waiting there, generated or rewarded.", "> 0"),
    row("buffer/num_ready", "groups", "Finished, waiting for a step.", "> 0 if the learner must not wait"),
    row("buffer/num_taken", "groups", "Taken by a step whose weights are not live yet.", "<= num_slots"),
    row("buffer/oldest_age", "versions", "Age at the next step of the oldest group outstanding.", "<= S"),
    row("buffer/version", "versions", "Version that is live on the engines, as the buffer sees it.", "grows"),
    row("buffer/admitted", "groups", "Prompts admitted since the start of the run.", "grows"),
    row(
        "buffer/finished",
        "groups",
        "Groups that finished since the start of the run, as all that follow but the waits.",
        "grows",
    ),
    row("buffer/trained", "groups", "Groups trained, with weights live.", "grows"),
    row("buffer/filtered/*", "groups", "Groups filtered, by reason.", "few"),
    row("buffer/failed", "groups", "Failed attempts, retried or not.", "0"),
    row("buffer/retried", "groups", "Attempts after a failure.", "0"),
    row("buffer/dropped/*", "groups", "Groups given up after their last retry, by error.", "0"),
    row("buffer/refilled", "groups", "Filtered and dropped groups, each replaced by one more prompt.", "few"),
    row("buffer/discarded_tokens", "tokens", "As discarded_tokens.", "0, always"),
    row(
        "buffer/take_wait_s",
        "s",
        "Wait for groups of the next step since the process began, the learner being idle or not.",
        "any",
    ),
    row("buffer/forced_wait_s", "s", "Part of it spent on old groups while enough others were ready.", "any"),
    row("buffer/slot_wait_s", "s", "Wait for a free slot since the process began.", "any"),
    row("data/epoch", "epochs", "Epoch of the prompt that is admitted next, from 0.", "grows"),
    row("data/difficulty_mean", "as the column", "Mean difficulty of the step's prompts; with a curriculum.", "rises"),
    row(
        "data/pass_rate_mean",
        "fraction",
        "Mean of the newest pass rates of all prompts that have one; with the pass-rate filter, as the next two.",
        "rises",
    ),
    row("data/resting", "prompts", "Prompts outside task.pass_rate_min .. pass_rate_max, now.", "well below all"),
    row(
        "data/skipped/*",
        "prompts",
        "Turns of a prompt that were passed over since the start of the run: too_hard, too_easy.",
        "grows",
    ),
    row(
        "telemetry/sink_errors",
        "errors",
        "Records that a sink did not take since the process began, also one that was asked for and could not be made;"
        " log.txt has the reason.",
        "0",
    ),
    row(
        "telemetry/trajectory_errors",
        "errors",
        "Groups and evaluations that could not be recorded since the process began.",
        "0",
    ),
    row(
        "telemetry/trajectories_left_out",
        "records",
        "Groups, failed attempts and evaluations that were not recorded since telemetry.trajectories_gib was reached.",
        "0",
    ),
    row(
        "telemetry/trace_dropped",
        "events",
        "Trace events left out since the process began: over the limit of 2 million, or refused by the disk.",
        "0",
    ),
)
