"""`python -m trainer.bench`: real runs of one workload in several modes, compared from their run directories."""
