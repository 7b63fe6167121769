"""What makes a critic of a backbone: one number per token. Shape legend: `L` loss tokens, `E` hidden size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class ValueHead(nn.Module):
    """v = h . w + b, always in float32: a value of half precision could not tell apart returns near 1.

    It starts at 0, so every first value is 0 and the first advantages are those without a critic.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=torch.float32))
            self.bias = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def forward(self, hidden_LE: Tensor) -> Tensor:
        """float32[L]"""
        # Not a squeezed [L, 1]: FSDP2 hooks outputs, and those must not be views.
        return torch.mv(hidden_LE.float(), self.weight[0]) + self.bias

    @torch.no_grad()
    def reset(self) -> None:
        """Zero this rank's part, once there is memory."""
        for param in self.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).zero_()
