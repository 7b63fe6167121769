"""The outcome of a step: rewards, answers, evaluations, ages, and what was not trained."""

from __future__ import annotations

from trainer.telemetry.metric_rows.row import row

OUTCOMES = (
    row("step", "steps", "Optimizer steps done, resumes included; this line is about the last one.", "+1 per line"),
    row("version", "versions", "Policy version that this step made.", "= step"),
    row("time_s", "s", "Since the process began; a resumed run begins at 0 again.", "grows within a process"),
    row("reward/mean", "reward", "Mean reward of the step's answers, before shaping and filters of the loss.", "rises"),
    row("reward/std", "reward", "Standard deviation of those rewards over all answers.", "> 0"),
    row(
        "reward/turns_mean",
        "reward",
        "Part of reward/mean that an environment gave for turns; only on lines where it gave any.",
        "depends on the environment",
    ),
    row(
        "reward/greedy_mean",
        "reward",
        "Mean reward of the greedy answers that remax compares with; they count in no other metric of rewards, lengths "
        "or ages.",
        "rises; near reward/mean or above",
    ),
    row("reward/part/*", "reward", "Mean of one named part of the reward.", "depends on the reward"),
    row(
        "reward/zero_variance_frac",
        "fraction",
        "Groups whose answers all have the same reward (with remax: that of the greedy one); they teach nothing where "
        "answers are compared.",
        "< 0.8; 0 with dynamic sampling",
    ),
    row("response/tokens_mean", "tokens", "Mean length of the step's answers.", "no steady drift to the limit"),
    row("response/tokens_max", "tokens", "Longest answer of the step.", "<= rollout.max_response_tokens"),
    row("response/truncated_frac", "fraction", "Answers that ran into a token limit.", "< 0.1"),
    row(
        "agent/turns_mean",
        "turns",
        "Turns that the policy generated, per answer of the step. Absent where every answer is one turn and the agent "
        "does not count tool calls.",
        "> 1 once tools are used",
    ),
    row(
        "agent/tool_calls_mean",
        "calls",
        "Tool calls per answer of the step. Failed and malformed calls count, a call that is cut off does not. Only "
        "with an agent that counts its calls, such as tool_agent.",
        "> 0; at 0 the policy never uses a tool",
    ),
    row(
        "agent/tool_errors",
        "calls",
        "Tool calls of the step that returned an error to the policy: malformed, unknown tool, raised, or too slow.",
        "falls",
    ),
    row(
        "response/failed_frac",
        "fraction",
        "Responses without a reward since the step before, because their reward function or agent failed; those of "
        "groups that are not trained included.",
        "0",
    ),
    row(
        "eval/accuracy",
        "reward",
        "Mean reward of the held-out answers: an accuracy where rewards are 0 and 1. As all of eval/ but "
        "eval/failed_runs, only on the lines where an evaluation ended, and of the newest that did; evaluations.jsonl "
        "has them all.",
        "rises",
    ),
    row(
        "eval/accuracy_stderr",
        "reward",
        "Standard error of eval/accuracy; prompts count, not answers, which are not independent. Absent with one.",
        "below the gain that you look for",
    ),
    row("eval/accuracy/*", "reward", "The same of prompts that this reward judges, with task.reward.column.", "rises"),
    row("eval/num_prompts/*", "prompts", "Held-out prompts that this reward judges.", "constant"),
    row("eval/reward/part/*", "reward", "As reward/part, of the held-out answers.", "depends on the reward"),
    row(
        "eval/pass_at/*",
        "fraction",
        "Held-out prompts of which one of so many answers reaches trainer.eval_pass_reward, estimated unbiased from "
        "eval/num_samples answers each.",
        "rises",
    ),
    row("eval/num_samples", "answers", "Answers per held-out prompt.", "trainer.eval_samples"),
    row("eval/tokens_mean", "tokens", "Mean length of the held-out answers.", "no steady drift to the limit"),
    row(
        "eval/failed_runs",
        "evaluations",
        "Evaluations so far that gave no number, because an answer could not be scored or time was up; log.txt and "
        "evaluations.jsonl have the reasons.",
        "0",
    ),
    row("eval/version", "versions", "Policy version that was evaluated.", "<= version"),
    row("eval/num_prompts", "prompts", "Held-out prompts of the evaluation.", "task.eval_size"),
    row("eval/truncated_frac", "fraction", "Held-out answers that ran into a token limit.", "< 0.1"),
    row("eval/time_s", "s", "Duration of the evaluation.", "short beside eval_every steps"),
    row("staleness/mean", "versions", "Mean age of the trained tokens: step's version minus sampling version.", "<= S"),
    row("staleness/max", "versions", "Largest age of a trained token.", "<= mode.max_staleness, always"),
    row("staleness/p50", "versions", "Median age of the trained tokens.", "<= S"),
    row("staleness/p90", "versions", "90th percentile of the age of the trained tokens.", "<= S"),
    row("staleness/age_frac/*", "fraction", "Trained tokens of this age: 0, 1, ... S; they add up to 1.", "0 above S"),
    row("staleness/group_mean", "versions", "Mean age of the trained groups, from their admission.", "<= S"),
    row("staleness/group_max", "versions", "Largest age of a trained group.", "<= mode.max_staleness, always"),
    row("discarded_tokens", "tokens", "Finished tokens thrown away for age since the process began.", "0, always"),
    row("discarded/filtered_tokens", "tokens", "Tokens of groups that a filter replaced, since the last line.", "few"),
    row(
        "discarded/failed_tokens",
        "tokens",
        "Tokens of answers without a usable reward, all that was generated for them, since the last line.",
        "0",
    ),
    row(
        "discarded/given_up_tokens",
        "tokens",
        "Tokens that agent loops asked for and put into no turn of their answer, which has a reward; since the last "
        "line.",
        "0, unless loops ask for more than they use",
    ),
    row(
        "response/untrained/*",
        "answers",
        "Of the step's answers, those that carry no loss, by reason: failed, truncated, no_generated_tokens, "
        "no_peer_in_group (the only one of its group with a reward). Absent at 0.",
        "few",
    ),
    row(
        "discarded/excluded_tokens",
        "tokens",
        "Generated tokens of the step's judged answers that carry no loss, e.g. of truncated ones.",
        "few",
    ),
    row("discarded/retried_s", "s", "Group-seconds of failed attempts that were retried, since the last line.", "0"),
    row("discarded/dropped_s", "s", "The same of last attempts, after which the prompt was given up.", "0"),
    row("discarded/attempt_tokens", "tokens", "Of failed and cancelled attempts, since the workers began.", "0"),
    row(
        "length_bias/ks",
        "fraction",
        "KS distance between the lengths of generated and of trained answers, over the latest 256 groups or more; each "
        "token sequence of an answer counts.",
        "< 0.2",
    ),
    row(
        "length_bias/early_ks",
        "fraction",
        "Of groups admitted under one version, the latest 16 of which all are trained: KS distance between the "
        "lengths of those trained first and of all. 0 if one step trains them whole.",
        "< 0.2",
    ),
    row(
        "length_bias/early_length_ratio",
        "ratio",
        "Mean length of those trained first over that of all: below 1, short answers are trained earlier.",
        "> 0.8",
    ),
)
