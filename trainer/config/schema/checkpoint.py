"""`checkpoint`: saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = key(50, "Save after every so many steps; 0 saves at the end only.", ge=0)
    keep_last: int = key(2, "The newest complete checkpoints to keep.", ge=1)
    keep_every: int = key(
        0, "Beside those, keep every checkpoint whose step is divisible by this, for ever; 0 keeps none.", ge=0
    )
    resume: str = key(
        "auto",
        "`auto` resumes from the newest checkpoint in `run_dir` if there is one, `never` refuses a run directory that "
        "has one. A path resumes from that checkpoint, or the newest that run directory has; a later start with "
        "the same path resumes from the newest that followed. What does not lead to it, such as later steps of the "
        "same `run_dir`, moves to `checkpoints/abandoned`.",
        is_path=True,
    )
    save_at_end: bool = key(
        True,
        "Save a checkpoint after the last step. A run that is interrupted, or fails beside its learner, always does.",
    )
    export_hf: bool = key(True, "At the end, write the policy as a Hugging Face model to `run_dir/export`.")
