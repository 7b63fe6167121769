"""Every key is documented and does something."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

from tests.house.source import modules
from trainer.config.algorithm import ESTIMATORS, LOSSES
from trainer.config.schema import all_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.field import Key

KEYS = [info for info in all_keys().values() if not info.is_section]
_LEAVES = Counter(info.path.rpartition(".")[2] for info in KEYS)

OWNERS = {info.path.rpartition(".")[2] for info in all_keys().values() if info.is_section}
SECTION_CLASSES = {info.hint.__name__: info.path.rpartition(".")[2] for info in all_keys().values() if info.is_section}


def attribute_reads() -> Iterator[tuple[str, str, str]]:
    """(attribute, name of what it is read from, path) for every `x.attribute` outside of `trainer/config`.

    Where `x` is another name for a section (`sync = config.weight_sync`, or an argument `sync: WeightSyncConfig`), the
    section's own name is given.
    """
    for module in modules():
        if module.path.startswith("trainer/config/"):
            continue
        others = dict(other_names(module.tree))
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(attr=attr, value=ast.Name(id=base) | ast.Attribute(attr=base), ctx=ast.Load()):
                    yield attr, others.get(base.strip("_"), base.strip("_")), module.path
                case _:
                    pass


def other_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr=attr)) if attr in OWNERS:
                yield name, attr
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=False):
                    if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and value.attr in OWNERS:
                        yield target.id, value.attr
            case ast.arg(arg=name, annotation=annotation) if annotation is not None:
                owner = SECTION_CLASSES.get(ast.unparse(annotation).strip("'\""))
                if owner is not None:
                    yield name, owner
            case _:
                pass


def is_read(info: Key, reads: list[tuple[str, str, str]]) -> bool:
    """Whether code reads the key from its own section, or from a `config`. A name that several sections have must be
    read from a `config` in a file of its section."""
    section, _, leaf = info.path.rpartition(".")
    owner = section.rpartition(".")[2]
    for attribute, base, path in reads:
        if attribute != leaf:
            continue
        is_config = base in {"config", "cfg"} and (owner in path or _LEAVES[leaf] == 1)
        if is_config or (owner and base in {owner, f"{owner}_config"}):
            return True
    return False


@pytest.mark.parametrize("info", KEYS, ids=lambda info: info.path)
def test_a_key_is_documented_in_whole_sentences(info: Key) -> None:
    assert len(info.doc) >= 10
    assert info.doc.endswith(".")


def test_every_key_is_read_by_the_program() -> None:
    reads: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for read in attribute_reads():
        reads[read[0]].append(read)
    # Keyword arguments of losses and estimators, whose tests call every one with its keys.
    arguments = {f"algorithm.{key}" for traits in (*LOSSES.values(), *ESTIMATORS.values()) for key in traits.keys}
    unused = [
        info.path
        for info in KEYS
        if info.path not in arguments and not is_read(info, reads[info.path.rpartition(".")[2]])
    ]
    assert not unused, "these keys do nothing:\n" + "\n".join(unused)
