"""How new weights reach the engines, and what the engines are doing."""

from __future__ import annotations

from trainer.telemetry.metric_rows.row import row

ENGINES = (
    row("sync/pack_s", "s", "Slowest learner rank: casting and packing its shard into the arena.", "steady"),
    row("sync/seal_s", "s", "Slowest learner rank: digest of the packed bytes, beside training.", "< sync/pull_s"),
    row("sync/lease_s", "s", "Slowest engine worker: from the request to the first byte.", "~ sync/seal_s"),
    row("sync/pull_s", "s", "Slowest engine worker: reading the new weights.", "steady"),
    row("sync/pull_gb_per_s", "GB/s", "Rate of the slowest engine worker's pull.", "> 80% of what the link can do"),
    row("sync/pull_s/*", "s", "Slowest pull from one learner rank.", "alike for all ranks"),
    row("sync/attest_s", "s", "Checking digests of what arrived.", "< sync/pull_s"),
    row("sync/drain_s", "s", "From asking an engine to pause until the step under way had ended.", "one decode step"),
    row("sync/pause_s", "s", "Longest time that any engine stood still for a commit.", "< 5% of perf/step_s"),
    row("sync/commit_s", "s", "Slowest engine worker: putting the new weights in place.", "< sync/pause_s"),
    row("sync/resume_s", "s", "Slowest engine: the end of its pause, after the weights were in place.", "short"),
    row("sync/end_to_end_s", "s", "From when the sync begins until the last engine is live.", "< perf/step_s"),
    row("sync/bytes", "bytes", "Weights moved per version.", "constant"),
    row("sync/num_runs", "runs", "Contiguous copies per version.", "constant"),
    row("sync/num_retries", "retries", "Repeated pulls.", "0"),
    row("sync/num_stalls", "sources", "Reads from another engine that fell silent; the learner gave the rest.", "0"),
    row("sync/replicas_live", "replicas", "Engines with the new version.", "rollout.num_replicas"),
    row(
        "sync/replicas_skipped",
        "replicas",
        "Engines left out of this sync: lost, or leased by an evaluation.",
        "0; 1 while an evaluation runs",
    ),
    row("sync/version_lag", "versions", "Newest version minus the oldest that an engine still generates with.", "<= 1"),
    row(
        "sync/counter/*",
        "count",
        "Allocations, registrations, sockets and the like since the epoch opened.",
        "flat after version 1, but for answered requests and superseded versions",
    ),
    row("engine/held", "requests", "Requests that wait for room on an engine.", "0 with a fixed concurrency of null"),
    row(
        "engine/moved_requests",
        "requests",
        "Moves of a request so that its engine is free, since the rollout workers began; with rollout.repack_below.",
        "a few per freed engine; 0 without the key",
    ),
    row(
        "engine/moved_tokens",
        "tokens",
        "Tokens of these moves, prompts included, which the other engines computed again.",
        "< 20% of the generated tokens",
    ),
    row("engine/rescued_requests", "requests", "Sent on when their engine was lost, since the workers began.", "0"),
    row("engine/rescued_tokens", "tokens", "Tokens of answers that these had and kept.", "0"),
    row("engine/limit/*", "requests", "Most requests that the engine is sent at once, now.", "steady"),
    row("engine/in_flight/*", "requests", "Requests of training that the engine has.", "near engine/limit"),
    row("engine/running/*", "requests", "Requests in the engine's batch.", "<= rollout.max_num_seqs"),
    row(
        "engine/waiting/*",
        "requests",
        "Requests that wait inside the engine; they count as running unless it reports its load.",
        "0, but for a moment",
    ),
    row(
        "engine/kv_usage_frac/*",
        "fraction",
        "KV cache that running requests hold; with rollout.report_load or concurrency=adaptive.",
        "0.5 .. 0.95",
    ),
    row(
        "engine/preemptions/*",
        "requests",
        "Requests that lost their cache to others since the engine began; with rollout.report_load or "
        "concurrency=adaptive.",
        "grows rarely",
    ),
)
