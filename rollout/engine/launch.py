"""Starting vLLM: from an `EngineSpec` to a running `AsyncLLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.engine.settings import engine_args
from weight_sync import vllm_compat

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engine.base import EngineSpec


def launch(spec: EngineSpec) -> tuple[AsyncLLM, list[int]]:
    """Import vLLM and start its processes (blocking). The engine and the tokens that end an answer."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_compat.check_vllm_version()
    config = AsyncEngineArgs(**engine_args(spec)).create_engine_config(UsageContext.ENGINE_CONTEXT)
    stop = set(spec.stop_token_ids)
    found = config.model_config.try_get_generation_config().get("eos_token_id")
    if found is not None:
        stop.update([found] if isinstance(found, int) else found)
    if spec.tokenizer:
        from transformers import AutoTokenizer

        end = AutoTokenizer.from_pretrained(spec.tokenizer).eos_token_id
        stop.update(set() if end is None else {end})
    llm = AsyncLLM.from_vllm_config(config, usage_context=UsageContext.ENGINE_CONTEXT, disable_log_stats=True)
    return llm, sorted(stop)


def engine_pids(llm: AsyncLLM) -> list[int]:
    manager: Any = llm.engine_core.resources.engine_manager
    return [process.pid for process in getattr(manager, "processes", ())]
