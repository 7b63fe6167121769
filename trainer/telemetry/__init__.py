"""What a run reports: logs, metrics, traces, trajectories and the display. Imports without torch.

Nothing in here may end a run: a file that cannot be written is logged and counted.
"""
