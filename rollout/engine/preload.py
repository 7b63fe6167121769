"""What the server of engines imports before it forks.

A module that is missing here is imported later by the engine process itself; one that fails fails there again, where
the error is reported. Imports only: a device must not be touched before the fork.
"""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import Any

MODULES = (
    "ray",  # the engine process imports the main module of its parent, which is Ray's
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.registry",
    "torch._inductor.fx_passes.joint_graph",  # vLLM initializes its patterns at the end of every start
    "weight_sync.receive.receiver",  # not the extension itself, whose import has an effect
)

config: Any = sys.modules.get("torch._inductor.config")
if config is not None:
    config.compile_threads = 1  # vLLM sets a variable for it, which is read when that module is imported

for name in MODULES:
    with contextlib.suppress(Exception):
        import_module(name)
