"""The order of a curriculum: easy prompts before hard ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Sorts each of the first `num_epochs` epochs from easy to hard; later ones stay as they are.

    An epoch still shows every prompt once. Prompts of one difficulty keep the order that they came in, so that a
    column of a few levels gives shuffled blocks.

    Example:
        Curriculum(difficulties=np.array([3.0, 1.0, 2.0]), num_epochs=1).arrange(np.arange(3), epoch=0)  # 1, 2, 0
    """

    difficulties: np.ndarray
    """float64[prompts]: larger is harder."""
    num_epochs: int

    def arrange(self, order: np.ndarray, *, epoch: int) -> np.ndarray:
        """`order`: int[prompts], a permutation."""
        if epoch >= self.num_epochs:
            return order
        return order[np.argsort(self.difficulties[order], kind="stable")]

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes an order."""
        data = np.ascontiguousarray(self.difficulties, np.float64).tobytes() + str(self.num_epochs).encode()
        return hashlib.sha256(data).hexdigest()[:16]
