"""A core's first state where it is drawn: from a seed and the token's position, by a generator of its own.

No generator is carried on. So a token starts the same however its prompt is cut, whatever shares its step, after a
yield, and for everybody who has the same prefix. The seed belongs to the model: one per request would end all sharing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CUT = 3  # standard deviations


@dataclass(frozen=True)
class SeededStart:
    """A normal distribution of `std` around 0, without its ends beyond three `std` (Geiping et al. 2025)."""

    seed: int
    std: float

    def __call__(self, positions: Tensor, like: Tensor) -> Tensor:
        """The states [rows, hidden_size] that tokens at `positions` start from, as `like` in shape and type."""
        even = torch.from_numpy(np.stack([self._even(position, like.shape[1]) for position in positions.tolist()]))
        inside = torch.erf(torch.tensor(CUT / 2**0.5, dtype=torch.float64))
        drawn = self.std * 2**0.5 * torch.erfinv((2 * even - 1) * inside)
        return drawn.to(dtype=like.dtype, device=like.device)

    def _even(self, position: int, size: int) -> np.ndarray:
        """Numbers between 0 and 1. Philox (Salmon et al. 2011) counts: positions begin 2**128 numbers apart."""
        return np.random.Generator(np.random.Philox(key=self.seed, counter=position << 128)).random(size)
