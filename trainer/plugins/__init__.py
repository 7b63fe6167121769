"""Contracts of the functions that users bring: policy losses, advantage estimators, group filters, rewards."""
