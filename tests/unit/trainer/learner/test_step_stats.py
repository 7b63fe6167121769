"""Sums over ranks, where the device's collective library has no float64: HCCL is the one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from trainer.learner.step_stats import UpdateSums, sum_over_ranks

pytestmark = pytest.mark.usefixtures("one_rank")
MANY_TOKENS = 2**24 + 1


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and is computed on the host."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor) -> OnDevice:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, on_host.shape, dtype=on_host.dtype, device="cuda:0")
        made.on_host = on_host
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        goes_home = str(kwargs.pop("device", "cuda:0")) == "cpu" or "_local_scalar_dense" in str(function)
        args, kwargs = tree_map(lambda x: x.on_host if isinstance(x, OnDevice) else x, (args, kwargs))
        found = function(*args, **kwargs)
        return found if goes_home or not isinstance(found, torch.Tensor) else OnDevice(found)


@pytest.fixture(autouse=True)
def hccl(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, OnDevice):
            if tensor.dtype in (torch.float64, torch.uint64):
                raise RuntimeError(f"HCCL has no {tensor.dtype}")
            tensor = tensor.on_host
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def test_sums_are_exact_to_the_last_token() -> None:
    assert sum_over_ranks(OnDevice(torch.tensor([0.5, 2.0]))) == [0.5, 2.0]
    given = torch.tensor([1.5, MANY_TOKENS], dtype=torch.float64).numpy()
    assert sum_over_ranks(given) == sum_over_ranks([1.5, MANY_TOKENS]) == [1.5, MANY_TOKENS]
    assert given.tolist() == [1.5, MANY_TOKENS], "what was given is not the sum"


def test_the_sums_of_an_update_leave_the_device_before_they_are_reduced() -> None:
    sums = UpdateSums(torch.device("cpu"))
    for index in range(2):
        sums.add({"loss": OnDevice(torch.tensor(0.25)), "ratio_max": OnDevice(torch.tensor(1.0 + index))})
    found = sums.reduce(OnDevice(torch.tensor(9.0)), {"num_tokens": MANY_TOKENS})
    assert found == {"loss": 0.5, "grad_sq": 9.0, "num_tokens": MANY_TOKENS, "ratio_max": 2.0}
