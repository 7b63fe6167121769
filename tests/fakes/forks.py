"""How processes of tests start: forked from a server that has imported what they need, in milliseconds."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

PARTIES = ("torch._dynamo", "tests.fakes.weight_job")
"""The first use of a recorder imports torch._dynamo, which takes most of a second."""
RANKS = (*PARTIES, "transformers.models.qwen2.modeling_qwen2", "torch.distributed.fsdp", "tests.fakes.learner")


def forks(*preload: str) -> ForkServerContext:
    """A test process has one server. It imports what its first user asks for; the processes of later users import what
    is missing. PyTorch allows it next to `spawn`, as long as the server touches no device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context
