from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.fakes.learner import KINDS, TINY, drawn_config, make_learner, run_config, save_tiny, sequences, weights
from trainer.config.schema import ModelConfig
from trainer.errors import ModelError
from trainer.learner.model import check_model, torch_dtype
from trainer.learner.weights import INDEX_FILE, init_weights

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_loaded_weights_equal_the_files(kind: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, kind)
    expected = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    loaded = weights(make_learner(run_config(directory)))
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.equal(expected[name]), name


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


def test_names_transformers_must_convert_take_the_slow_way(tmp_path: Path, tiny_dir: Path) -> None:
    for name in ("config.json",):
        (tmp_path / name).write_text((tiny_dir / name).read_text())
    tensors = load_file(tiny_dir / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    loaded = weights(make_learner(run_config(tmp_path)))
    assert all(t.equal(tensors[n]) for n, t in loaded.items())


def test_tied_embeddings_stay_one_parameter(tiny_dir: Path) -> None:
    learner = make_learner(run_config(tiny_dir))
    assert "lm_head.weight" not in dict(learner.model.named_parameters())
    learner.train_step(sequences(2), step=0)
    assert learner.model.lm_head.weight is learner.model.model.embed_tokens.weight


def test_weights_that_are_drawn_come_from_the_seed(tmp_path: Path) -> None:
    Qwen2Config(**TINY | {"hidden_size": 256}, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    first, second = (weights(make_learner(drawn_config(tmp_path))) for _ in range(2))
    assert all(t.equal(second[n]) for n, t in first.items())
    assert first["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["model.norm.weight"].eq(1).all() and first["model.layers.1.self_attn.q_proj.bias"].eq(0).all()
    assert not first["model.layers.0.mlp.up_proj.weight"].equal(first["model.layers.1.mlp.up_proj.weight"])


def test_weights_that_are_missing_are_not_drawn_unless_that_is_asked_for(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())
    with pytest.raises(ModelError, match=r"has no weights \(found \['config\.json'\]\)"):
        make_learner(run_config(tmp_path))
    with pytest.raises(ModelError, match="has weights, which model"):
        make_learner(drawn_config(tiny_dir))


def test_numbered_files_are_read_without_their_index(tmp_path: Path, tiny_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / INDEX_FILE).unlink()
    loaded = weights(make_learner(run_config(tmp_path)))
    assert all(t.equal(dict(model.named_parameters())[n]) for n, t in loaded.items())


def test_weights_from_the_seed_are_the_same_wherever_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators of different devices give different numbers, so only that of the device that computes is asked."""
    drawn: list[tuple[str, torch.device]] = []
    normal = torch.Tensor.normal_

    def noted(tensor: torch.Tensor, *args: Any, generator: torch.Generator) -> torch.Tensor:
        drawn.append((tensor.device.type, generator.device))
        return normal(tensor, *args, generator=generator)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**TINY))
    monkeypatch.setattr(torch.Tensor, "normal_", noted)
    init_weights(model, seed=3, device=torch.device("cpu"))
    assert drawn
    assert set(drawn) == {("cpu", torch.device("cpu"))}


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


def test_weights_that_the_config_has_no_place_for_are_told(
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


def test_weights_of_another_shape_are_refused(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())
    tensors = load_file(tiny_dir / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight has shape \(5,\), the model's config.json asks for \(32,\)"
    ):
        make_learner(run_config(tmp_path))


def test_float16_training_is_refused() -> None:
    with pytest.raises(ModelError, match="must be float32 or bfloat16 for training, got 'float16'"):
        torch_dtype("float16")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "many"},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0},
        {"model_type": "nonsense"},
        {"model_type": 3},
        {"vocab_size": -5},
        {"hidden_act": "no_such_function"},
    ],
    ids=str,
)
def test_a_damaged_config_is_refused_without_weights(
    changes: dict[str, object], tmp_path: Path, tiny_dir: Path
) -> None:
    described = json.loads((tiny_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, **changes}))
    with pytest.raises(ModelError, match=r"config\.json"):
        check_model(ModelConfig(path=str(tmp_path)), tmp_path)


def test_a_whole_model_and_one_without_weights_pass_the_check(tmp_path: Path, tiny_dir: Path) -> None:
    check_model(ModelConfig(path=str(tiny_dir)), tiny_dir)
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())
    check_model(ModelConfig(path=str(tmp_path)), tmp_path)
