"""The rules would see what they look for."""

from __future__ import annotations

import ast

from tests.house.source import docstrings, runtime_imports, words_of_code
from tests.house.test_configuration import is_read, other_names
from tests.house.test_documents import commands
from tests.house.test_imports import EXTRAS, VENDORS
from trainer.config.schema import all_keys

SAMPLE = '''
"""Speaks of cuda."""
# and of nccl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import vllm
else:
    import hydra

def load(device="npu"):
    """hip"""
    from ray import actor
    torch.cuda.synchronize()
    return actor
'''


def test_imports_are_found_in_functions_and_not_under_type_checking() -> None:
    names = {name for name, _ in runtime_imports(ast.parse(SAMPLE))}
    assert names == {"os", "typing", "hydra", "ray"}


def test_words_are_found_in_code_and_strings_and_not_in_docstrings_and_comments() -> None:
    tree = ast.parse(SAMPLE)
    found = {match[0] for text, _ in words_of_code(tree) if (match := VENDORS.search(text))}
    assert found == {"npu", "cuda"}
    assert {node.value for node in docstrings(tree)} == {"Speaks of cuda.", "hip"}


def test_vendor_words_are_whole_words_and_extras_are_names_of_ours() -> None:
    assert VENDORS.search("is_cuda") and VENDORS.search("NCCL_DEBUG") and VENDORS.search("x.npu")
    assert not VENDORS.search("chip") and not VENDORS.search("input")
    assert not VENDORS.search(EXTRAS.sub("", "pip install tandem-rl[cuda]"))


def test_a_key_is_read_through_other_names_of_its_section_and_not_by_chance() -> None:
    tree = ast.parse("sync = config.weight_sync\nrollout, x = config.rollout, 1\ndef f(c: LearnerConfig): ...")
    assert dict(other_names(tree)) == {"sync": "weight_sync", "rollout": "rollout", "c": "learner"}
    compile_key = all_keys()["learner.compile"]
    assert not is_read(compile_key, [("compile", "re", "trainer/a.py")])
    assert is_read(compile_key, [("compile", "learner", "trainer/a.py")])


def test_commands_are_found_in_documents() -> None:
    assert any("python -m trainer" in line for _, line in commands())
