"""`trainer`: how long, how much per step, and when to evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    total_steps: int = key(100, "Optimizer steps of the whole run, resumes included.", ge=1)
    groups_per_step: int = key(32, "B: prompts (groups) per optimizer step.", ge=1)
    eval_every: int = key(
        10,
        "Evaluate after every so many steps, for at most `eval_timeout_s`; one that is due while another runs is of "
        "the next live version after it, or of the last one. 0 turns periodic evaluation off.",
        ge=0,
    )
    eval_at_start: bool = key(
        True, "Evaluate version 0 (or the resumed version) first, beside training unless `eval_blocking`."
    )
    eval_at_end: bool = key(True, "Evaluate the last version, also where `eval_every` does not.")
    eval_samples: int = key(1, "Answers per held-out prompt in an evaluation.", ge=1)
    eval_temperature: float = key(
        0.0, "Sampling temperature of evaluations: 0 is greedy, otherwise at least 0.01.", ge=0, le=2
    )
    eval_top_p: float = key(1.0, "Nucleus sampling of evaluations; 1 is the whole vocabulary.", gt=0, le=1)
    eval_pass_k: int | None = key(
        None,
        "k of `eval/pass_at/k`: how likely one of k answers passes, estimated from `eval_samples` answers; null is "
        "`eval_samples`. `eval/pass_at/1` is always there.",
        ge=1,
    )
    eval_pass_reward: float = key(1.0, "Reward from which a held-out answer passes.")
    eval_blocking: bool = key(
        False,
        "Let the learner wait for each evaluation at the start and between steps; all engines then share its prompts. "
        "Otherwise one engine evaluates beside training.",
    )
    eval_timeout_s: float = key(
        7200.0,
        "Longest time of one evaluation. One that takes longer, or an answer of which cannot be scored, is reported as "
        "failed, with no number, and training goes on.",
        gt=0,
    )
    stop_at_accuracy: float | None = key(
        None,
        "Stop successfully once an evaluation reaches this accuracy on `task.eval_path`; null never does.",
        gt=0,
        le=1,
    )
    startup_timeout_s: float = key(900.0, "Deadline for Ray to start, and again for all actors to be ready.", gt=0)
    shutdown_timeout_s: float = key(30.0, "Longest orderly shutdown before processes are killed.", gt=0)
    stall_timeout_s: float = key(
        1800.0, "Stop with the reason if the learner waits for so long for the groups of a step.", gt=0
    )
