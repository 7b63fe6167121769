"""Tandem: fully asynchronous RL post-training for language models. Start it with `python -m trainer`."""
