"""`python -m weight_sync.bench`: what weight sync costs on this machine, beside the fastest copy the machine can do."""
