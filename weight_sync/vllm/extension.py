"""The methods that vLLM's workers get.

Every attribute is prefixed `ws_`, since vLLM refuses an extension that collides with its worker class. Every method
answers bytes, an encoded `Reply`: vLLM's RPC would flatten an exception to a string, and with several workers report
only one. vLLM runs these calls between two engine steps, so each returns quickly or, for a commit, within its deadline;
`collective_rpc(timeout=)` is not used, because replies carry no id and a late one would answer the next call.

Importing this module switches vLLM's CPU weight packing off. This is the one import with an effect in the package:
vLLM imports the extension in each worker right before it loads the model, and offers no other hook that early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from weight_sync.device.select import get_backend
from weight_sync.messages import answer, encode
from weight_sync.receive.receiver import WeightReceiver, WorkerCalls
from weight_sync.vllm.compat import check_vllm_version
from weight_sync.vllm.cpu import keep_weights_addressable
from weight_sync.vllm.lora import open_slot, synced_model
from weight_sync.vllm.reload import layerwise_reloader

if TYPE_CHECKING:
    import torch


keep_weights_addressable()


class _ModelRunner(Protocol):
    def get_model(self) -> torch.nn.Module: ...


class _Worker(Protocol):
    """The part of vLLM's worker that we use; unchanged from 0.25.1 to 0.32."""

    rank: int
    """Rank inside the replica, over tensor and pipeline parallelism."""
    model_runner: _ModelRunner
    vllm_config: object


class WeightSyncExtension(WorkerCalls):
    """Mixed into the worker class, so `self` is a vLLM worker, whose `__init__` alone is run."""

    def ws_make_receiver(self) -> WeightReceiver:
        return make_receiver(cast("_Worker", self))

    def ws_open_adapter(self) -> bytes:
        """Before the first request of an engine with LoRA: give it the policy's adapter, as zeros."""
        worker = cast("_Worker", self)
        return answer(lambda: encode(open_slot(worker.model_runner)), is_dirty=lambda: False)


def make_receiver(worker: _Worker) -> WeightReceiver:
    """A receiver for the model of a vLLM worker, on the device that the model lives on."""
    check_vllm_version()
    model = synced_model(worker.model_runner)
    is_on_host = next(model.parameters()).device.type == "cpu"
    backend = get_backend("cpu" if is_on_host else "auto")
    # An adapter is no model that vLLM could load again.
    reloader = layerwise_reloader(model, worker.vllm_config) if model is worker.model_runner.get_model() else None
    return WeightReceiver(model, backend, worker=worker.rank, reloader=reloader)
