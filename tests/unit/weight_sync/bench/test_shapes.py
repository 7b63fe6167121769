"""Shapes of the models that are measured, against their published parameter counts."""

from __future__ import annotations

import pytest

from weight_sync.bench.shapes import MODELS, architecture

PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}


def test_every_model_has_its_published_number_of_parameters() -> None:
    assert {name: arch.num_params for name, arch in MODELS.items() if name != "tiny"} == PUBLISHED


def test_names_and_shapes_are_those_that_transformers_builds_from_the_same_configuration() -> None:
    """Not for experts: transformers fuses them in memory and takes them apart in a checkpoint."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in ("tiny", "qwen2.5-0.5b", "llama3-8b", "qwen3-8b"):
        arch = architecture(name)
        values = arch.config("bfloat16")
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        found = {key: tuple(value.shape) for key, value in model.named_parameters()}
        assert found == dict(arch.shapes()), name


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"tiny, qwen2\.5-0\.5b.*got 'gpt-9'"):
        architecture("gpt-9")
