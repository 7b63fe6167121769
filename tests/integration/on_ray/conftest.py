"""Everything here shares a separate Ray cluster. Actors are made and ended by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import ray
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[3]
IMPORTS = f"{REPOSITORY}:{Path(__file__).resolve().parents[1]}"
"""Actor classes of a test here are known as `on_ray.test_...`: this directory is a package, those above it are none."""


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """CPUs are only counted: there is room for every test's actors, also while those of the last one end."""
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1"}},
        _system_config={"prestart_worker_first_driver": False},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="package")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a tokenizer whose tokens are the numbers below 200."""
    path = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {str(number): number for number in range(200)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return str(path)
