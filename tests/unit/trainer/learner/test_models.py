"""Loading a model: its files, kinds that are refused before anything starts, and what is changed in the others."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from tests.fakes.learner import (
    KINDS,
    TINY,
    check_model,
    drawn_config,
    logprobs,
    make_learner,
    pack,
    run_config,
    save_tiny,
    sequences,
    weights,
)
from tests.fakes.scripted_run import config
from trainer.errors import ModelError
from trainer.learner import model as architecture
from trainer.learner import weights as files
from trainer.learner.model import meta_model
from trainer.learner.weights import check_weights, checkpoint_files, has_weights, resolve_model_dir

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_loaded_weights_equal_the_files(kind: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, kind)
    check_model(directory)
    expected = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    loaded = weights(make_learner(run_config(directory)))
    assert loaded.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in loaded.items())


def test_names_that_transformers_must_convert_are_loaded_the_slow_way(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())
    torch.save(load_file(tiny_dir / "model.safetensors"), tmp_path / "pytorch_model.bin")
    expected = dict(AutoModelForCausalLM.from_pretrained(tiny_dir).named_parameters())
    assert all(tensor.equal(expected[name]) for name, tensor in weights(make_learner(run_config(tmp_path))).items())


def test_bfloat16_files_become_float32_masters(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(KINDS["llama"](), dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = weights(make_learner(run_config(tmp_path)))
    files = load_file(tmp_path / "model.safetensors")
    assert all(t.dtype == torch.float32 and t.equal(files[n].float()) for n, t in loaded.items())


def test_sharded_files_are_found_through_their_index(tmp_path: Path, tiny_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = weights(make_learner(run_config(tmp_path)))
    assert all(t.equal(dict(model.named_parameters())[n]) for n, t in loaded.items())
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    victim.unlink()
    with pytest.raises(ModelError, match=f"names {victim.name}"):
        make_learner(run_config(tmp_path))


def test_tied_embeddings_stay_one_parameter(tiny_dir: Path) -> None:
    learner = make_learner(run_config(tiny_dir))
    assert "lm_head.weight" not in dict(learner.model.named_parameters())
    learner.train_step(sequences(2), step=0)
    assert learner.model.lm_head.weight is learner.model.model.embed_tokens.weight


def test_weights_that_are_drawn_come_from_the_seed(tmp_path: Path) -> None:
    Qwen2Config(**TINY | {"hidden_size": 256}, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    check_model(tmp_path)
    with pytest.raises(ModelError, match=r"has no weights \(found \['config\.json'\]\)"):
        make_learner(run_config(tmp_path))
    first, second = (weights(make_learner(drawn_config(tmp_path))) for _ in range(2))
    assert all(t.equal(second[n]) for n, t in first.items())
    assert first["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["model.norm.weight"].eq(1).all() and first["model.layers.1.self_attn.q_proj.bias"].eq(0).all()
    assert not first["model.layers.0.mlp.up_proj.weight"].equal(first["model.layers.1.mlp.up_proj.weight"])


def test_damaged_files_are_named(tmp_path: Path, tiny_dir: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text((tiny_dir / "config.json").read_text())
    data = (tiny_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .* damaged or truncated"):
        make_learner(run_config(tmp_path))
    config.write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        make_learner(run_config(tmp_path))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_weight_that_no_file_holds_is_named_and_never_drawn(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"has no weights for {name} \(1 tensors are missing\).*finish the download"):
        make_learner(run_config(tmp_path))


def test_weights_without_a_place_in_the_config_are_reported_and_those_of_another_shape_refused(
    tmp_path: Path, tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())
    tensors = load_file(tiny_dir / "model.safetensors")
    unused = {"lm_head.weight": torch.ones(61, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | unused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    make_learner(run_config(tmp_path))
    assert not caplog.messages, "a tied matrix, and what is computed"
    save_file(tensors | {"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    make_learner(run_config(tmp_path))
    (message,) = caplog.messages
    assert message.startswith(f"1 tensors in {tmp_path} are not trained")
    assert "model.layers.7.mlp.up_proj.weight;" in message
    save_file(tensors | {"model.norm.weight": torch.ones(5)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"norm\.weight has shape \(5,\), the model's config.json asks for \(32,\)"):
        make_learner(run_config(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "many"), ("num_hidden_layers", -1), ("num_attention_heads", 0), ("model_type", "nonsense"),
     ("model_type", 3), ("vocab_size", -5), ("hidden_act", "no_such_function")],
)  # fmt: skip
def test_a_damaged_config_is_refused_without_weights(key: str, value: object, tmp_path: Path, tiny_dir: Path) -> None:
    described = json.loads((tiny_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, key: value}))
    with pytest.raises(ModelError, match=r"config\.json"):
        check_model(tmp_path)


def write(path: Path, *names: str) -> Path:
    save_file({name: torch.zeros(1) for name in names}, path)
    return path


def test_a_missing_directory_is_reported_with_its_key(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(
        ModelError, match=r"^model.path '/.*/absent' is not a directory; give a Hugging Face model dire"
    ):
        resolve_model_dir(absent, key="model.path")
    with pytest.raises(ModelError, match=r"^critic.path '.*' has no config\.json \(found \[\]\)"):
        resolve_model_dir(str(tmp_path), key="critic.path")


@pytest.mark.parametrize(("name", "key"), [("own/policy", "model.path"), ("own/critic", "critic.path")])
def test_a_name_that_the_hub_does_not_have_is_reported_with_its_key(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(_name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    cfg = config(model={"path": "own/policy"}, critic={"path": "own/critic"})
    with pytest.raises(ModelError, match=f"^{key} '{name}' is neither a directory here nor a model the hub gives us"):
        meta_model(name, cfg)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors", "any.safetensors"])
def test_safetensors_of_any_name_are_weights(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, "a", "b")
    assert checkpoint_files(tmp_path) == {"a": path, "b": path}
    check_weights(tmp_path, is_random_init=False)
    with pytest.raises(ModelError, match=r"has weights, which model\.random_weights=true would not read"):
        check_weights(tmp_path, is_random_init=True)


def test_a_directory_without_weights_is_for_drawing_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "consolidated.00.pth").touch()
    check_weights(tmp_path, is_random_init=True)
    with pytest.raises(ModelError, match=r"no weights \(found \['config\.json', 'consolidated.*random_weights=true"):
        check_weights(tmp_path, is_random_init=False)
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    assert has_weights(tmp_path)


def test_files_that_both_hold_a_tensor_are_refused_and_a_missing_one_is_an_unfinished_download(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00003.safetensors", "a", "b")
    write(tmp_path / "model-00003-of-00003.safetensors", "b", "c")
    with pytest.raises(ModelError, match=r"-of-00003\.safetensors and model-\d+-of-00003\.safetensors both hold b"):
        checkpoint_files(tmp_path)
    write(tmp_path / "model-00003-of-00003.safetensors", "c")
    with pytest.raises(ModelError, match=r"has 2 of the 3 files model-\*-of-\*\.safetensors; finish the download"):
        check_weights(tmp_path, is_random_init=False)


@pytest.mark.parametrize(("weights", "num_asked"), [("model.safetensors", 1), ("pytorch_model.bin", 2)])
def test_a_hub_model_without_safetensors_comes_with_its_other_weights(
    weights: str, num_asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot_download(_name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        (tmp_path / "config.json").touch()
        if any((tmp_path / weights).match(pattern) for pattern in allow_patterns):
            (tmp_path / weights).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert (resolve_model_dir("owner/name", key="model.path") / weights).exists()
    assert len(asked) == num_asked


MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 8.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def model_config(kind: str, **fields: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**TINY, "pad_token_id": 0, **fields})


def saved(directory: Path, kind: str, **fields: Any) -> RunConfig:
    """A random model whose weights are large enough that a change anywhere shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(kind, **fields), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0, 0.2)
    model.save_pretrained(directory)
    return run_config(directory)


def quantized(method: str, **fields: Any) -> tuple[str, dict[str, Any], str]:
    """Read without its scales it would train as other numbers, and an export would name a quantization it lacks."""
    return "qwen3", {"quantization_config": {"quant_method": method, **fields}}, rf"\(quant_method '{method}'\)"


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("gpt2", {}, "no decoder blocks"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "intermediate_size": 64}, "layers of type conv"),
        ("minimax", {"num_local_experts": 4}, "layers of type linear_attention"),
        ("recurrent_gemma", {}, r"logits_soft_cap=30\.0"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "type dynamic"),
        ("nemotron", {}, "NemotronAttention was not given packed=<layout>"),
        ("doge", {}, "attention_mask"),
        ("deepseek_v3", MLA, "values of size 8 and keys of size 16"),
        ("falcon", {}, "its own attention code"),
        quantized("fp8", weight_block_size=[128, 128]),
        quantized("bitsandbytes", load_in_4bit=True),
        quantized("gptq", bits=4),
    ],
)
def test_models_that_cannot_run_packed_or_are_quantized_are_refused_by_their_config_alone(
    kind: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model_config(kind, **fields).save_pretrained(tmp_path)
    advice = "give the model in bfloat16" if kind == "qwen3" else "use Qwen2, Qwen3, Qwen3-MoE, Llama or Mistral"
    with pytest.raises(ModelError, match=f"{words}.*{advice}"):
        check_model(tmp_path)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_capped_scores_and_logits_and_attention_sinks_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    learner, parts = make_learner(run_config(save_tiny(tmp_path, kind))), sequences(5)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    found = np.split(logprobs(learner, pack(parts)), np.cumsum([len(part.token_ids) for part in parts])[:-1])
    for part, got in zip(parts, found, strict=True):
        ids = torch.from_numpy(part.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(hf(ids[None]).logits[0] / 0.8, dim=-1)
        expected = logprobs_TV[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
        mask = part.loss_mask[1:]
        np.testing.assert_allclose(got[1:][mask], expected[mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields", "size", "words"),
    [
        ("llama", {}, 4, "num_key_value_heads=2 is no multiple of it;"),
        ("llama", {}, 8, "num_attention_heads=4 is no multiple of it; num_key_value_heads=2 is no multiple of it;"),
        ("qwen2", {"intermediate_size": 44}, 2, r"up_proj has 44 features, no multiple of 8 \(ranks of a replica\);"),
        ("qwen2", {"intermediate_size": 41}, 2, r"down_proj has 41 features, no multiple of 2 \(of them\);"),
        ("phi3", {}, 2, r"qkv_proj is colwise_gather_output in its plan, only matrices that are colwise or rowwise"),
        ("mixtral", {"num_local_experts": 4}, 2, r"gate is not in its plan.*experts is moe_tp_experts in its plan"),
        ("bitnet", {}, 2, "transformers has no plan"),
        ("apertus", {}, 2, r"act_fn has parameters among divided features and is not in its plan"),
    ],
)
def test_models_that_tensor_parallelism_cannot_divide_are_refused_by_their_config_alone(
    kind: str, fields: dict[str, Any], size: int, words: str, tmp_path: Path
) -> None:
    model_config(kind, **fields).save_pretrained(tmp_path)
    check_model(tmp_path)
    with pytest.raises(ModelError, match=f"cannot be divided by learner.tensor_parallel_size={size}: .*{words}"):
        check_model(tmp_path, num_ranks=8, tensor_parallel_size=size)


def test_a_block_without_attention_is_refused_where_the_config_does_not_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "LAYER_TYPES", {"conv", "full_attention"})
    model_config("lfm2", layer_types=["full_attention", "conv"], intermediate_size=64).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"1 of 2 blocks without attention \(the first is 1\)"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("seed_oss", {"head_dim": 8}),
        ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.1}),
        ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}),
        ("phimoe", {"num_local_experts": 4, "lm_head_bias": False, "input_jitter_noise": 0.1}),
    ],
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_same_weights_give_the_same_logprobs(
    kind: str, fields: dict[str, Any], recomputes: bool, tmp_path: Path
) -> None:
    saved(tmp_path, kind, **fields)
    learner, batch = make_learner(run_config(tmp_path, activation_checkpointing=recomputes)), pack(sequences(4))
    first = logprobs(learner, batch)
    np.testing.assert_array_equal(logprobs(learner, batch), first)
    block = learner.model.base_model.layers[0]
    assert block.training and not block.mlp.training, "what may recompute stays in training mode, its parts do not"


@pytest.mark.parametrize(
    ("max_model_len", "response", "factor"), [(16, 9, 1.0), (17, 8, 2.0), (0, 8, 1.0), (0, 9, 2.0)]
)
def test_longrope_takes_the_factors_that_an_engine_of_this_context_takes(
    max_model_len: int, response: int, factor: float, tmp_path: Path
) -> None:
    """vLLM: the long ones if max_model_len > original_max_position_embeddings, for short sequences too."""
    cfg = saved(tmp_path, "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    rollout = replace(cfg.rollout, max_model_len=max_model_len, max_response_tokens=response)
    cfg = replace(cfg, rollout=rollout, task=replace(cfg.task, max_prompt_tokens=8))
    learner, parts = make_learner(cfg), sequences(4)
    assert min(len(part.token_ids) for part in parts) <= 16 < max(len(part.token_ids) for part in parts)
    alone = np.concatenate([logprobs(learner, part) for part in parts])
    np.testing.assert_allclose(logprobs(learner, pack(parts)), alone, atol=1e-5)
    expected = 1 / (factor * 10000.0 ** (torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(learner.model.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_fused_experts_a_rank_reads_its_own_alone(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path, "qwen3_moe"), dtype=torch.float32)
    halves: list[files.OwnPart] = []
    for part in files.own_parts(model):
        length = part.shape[0] // 2
        rows = slice(rank * length, (rank + 1) * length)
        own = torch.zeros(length, *part.shape[1:])
        halves.append(part._replace(box=(rows, *part.box[1:]), tensor=own))
    expected = {part.name: part.tensor[half.box[0]] for part, half in zip(files.own_parts(model), halves, strict=True)}
    monkeypatch.setattr(files, "own_parts", lambda _: iter(halves))
    found = checkpoint_files(tmp_path)
    assert found is not None and files.load_rows(model, found)
    for half in halves:
        assert torch.equal(half.tensor, expected[half.name]), half.name
