"""`python -m trainer.advise RUN_DIR`: which side of a run waits for the other, and what to change."""
