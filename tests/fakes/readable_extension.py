"""The worker extension of weight sync, for tests that look at what an engine holds."""

from __future__ import annotations

from typing import Any

import msgspec

from weight_sync.receive.staging import parameter_bytes
from weight_sync.vllm.extension import WeightSyncExtension
from weight_sync.vllm.lora import synced_model

READABLE = "tests.fakes.readable_extension.ReadableExtension"


class ReadableExtension(WeightSyncExtension):
    model_runner: Any

    def te_read(self, names: list[str]) -> bytes:
        """Of the live parameters with these names: a map to their bytes. A stage of a pipeline has some of them."""
        views = parameter_bytes(synced_model(self.model_runner))
        return msgspec.msgpack.encode({name: views[name].cpu().numpy().tobytes() for name in names if name in views})
