"""Processes that are forked from a server which has imported what they need, so that one starts in milliseconds.

A test process has one such server: what the first of its users asks for is imported once, and later ones import only
what is missing. PyTorch allows this start method next to `spawn`, as long as the server touches no device.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

PARTIES = ("torch._dynamo", "tests.fakes.replica_process", "tests.fakes.coordinator_process")
"""The first use of a recorder imports torch._dynamo, which takes most of a second."""
RANKS = (*PARTIES, "transformers.models.qwen2.modeling_qwen2", "torch.distributed.fsdp", "tests.fakes.learner")


def forks(*preload: str) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context
