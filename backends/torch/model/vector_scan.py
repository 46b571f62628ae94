"""Finds the rows that may be nearest to a few queries, in one float32 pass over all rows with a proven error margin."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agentspec.backends.base import Floats
from agentspec.backends.torch.model.layers.packed_linear import PackedLinear, can_pack

BLOCK = 8192  # rows packed together
ROUNDOFF = 2.0**-24  # unit roundoff of float32, rounding to nearest


class VectorScan:
    """Holds rows [n, width] in linear layers, which score all queries at once for about the cost of one query.

    A row's score is query . row - |row|^2 / 2, greater for nearer rows. Holds the rows in float32. Only the computing
    thread may use it.
    """

    def __init__(self, rows: NDArray[np.float16], device: torch.device) -> None:
        self._device = device
        self._width = rows.shape[1]
        self._blocks = list[nn.Module]()
        self._longest = 0.0
        for start in range(0, len(rows), BLOCK):
            self._add(rows[start : start + BLOCK])

    def near(self, queries: Floats, count: int) -> list[NDArray[np.int64]]:
        """For each of `queries` [q, width], the indices, ascending, of the rows that may be among its `count` nearest.

        The result contains all nearest rows, equally near ones included, however the float32 sums were rounded.
        """
        asked = torch.from_numpy(queries).to(self._device)
        scores = torch.cat([block(asked) for block in self._blocks], dim=1)
        margins = (2 * self._error(np.linalg.norm(queries.astype(np.float64), axis=1))).tolist()
        return [_within(row, count, margin) for row, margin in zip(scores, margins, strict=True)]

    def _add(self, rows: NDArray[np.float16]) -> None:
        halves = np.square(rows.astype(np.float64)).sum(1) / 2
        self._longest = max(self._longest, float(np.sqrt(2 * halves.max())))
        with torch.device("meta"):
            linear = nn.Linear(self._width, len(rows))
        linear.weight = nn.Parameter(torch.from_numpy(rows.astype(np.float32)).to(self._device), requires_grad=False)
        linear.bias = nn.Parameter(torch.from_numpy(-halves).float().to(self._device), requires_grad=False)
        packs = self._device.type == "cpu" and can_pack()
        self._blocks.append(PackedLinear(linear) if packs else linear)

    def _error(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """The largest error of a computed score, for queries of these lengths (norms).

        A sum of w products in any order has an error of at most w u |q| |r| to first order (Higham 2002, section 3.1);
        the bias adds its own rounding and that of its addition. Twice the bound covers the second order.
        """
        products = (self._width + 2) * lengths * self._longest
        return np.asarray(2 * ROUNDOFF * (products + self._longest**2))


def _within(scores: Tensor, count: int, margin: float) -> NDArray[np.int64]:
    """The indices of the `scores` that are at most `margin` below the `count`-th best."""
    least = scores.topk(min(count, len(scores))).values[-1].double() - margin
    found: NDArray[np.int64] = (scores.double() >= least).nonzero()[:, 0].cpu().numpy()
    return found
