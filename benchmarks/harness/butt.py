"""Algorithm 3.4 of Butt's thesis for equal layers, as printed, for comparison with the thesis's figure and with a solver.

Two lines of the print are misprints: line 50 takes the left half's peak from the whole (``B[i][j]`` for ``B[i][k]``), and line 23 discards
its sum (the cost of running everything again). ``corrected`` replaces both. On equal layers neither changes a cost.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Infeasible", "algorithm_3_4"]


class Infeasible(ValueError):
    """The memory is too small for any schedule."""


def algorithm_3_4(num_layers: int, memory: int, *, corrected: bool) -> float:
    """Cost of a step in which every forward and backward takes time 1 and stores 1; the targets' gradient is one backward more.

    Args:
        num_layers: N of the thesis.
        memory: M of the thesis, input included.
        corrected: replace the two misprinted lines.

    Raises:
        Infeasible: no schedule fits.
    """
    room, end = memory - 1, num_layers + 1
    peak = np.zeros((end + 1, end + 1, room + 1))
    cost = np.zeros_like(peak)
    peak[:, :, :2] = np.inf  # the tables begin at two
    for m in range(2, room + 1):
        for i in range(num_layers, -1, -1):
            peak[i, i + 1, m], cost[i, i + 1, m] = 2, 1
            again, again_peak, forward_peak = 1, 2, 0
            for forwards, j in enumerate(range(i + 2, end + 1), start=1):
                again = (again if corrected else 0) + forwards + 1
                forward_peak = max(forward_peak, 1 if j - 2 == i else 2)
                again_peak = max(again_peak, 1 + forward_peak, 3)
                k = np.arange(i + 1, j)
                forward = 1 + np.where(k - i > 1, 2, 1)
                left = peak[i, k, m] if corrected else peak[i, j, m]
                needed = np.maximum(np.maximum(forward, 1 + peak[k, j, m - 1]), left)
                if (needed <= m).any():
                    total = np.where(needed <= m, k - i + cost[k, j, m - 1] + cost[i, k, m], np.inf)
                    best = int(total.argmin())
                    peak[i, j, m], cost[i, j, m] = needed[best], total[best]
                elif again_peak <= m:
                    peak[i, j, m], cost[i, j, m] = again_peak, again
                else:
                    peak[i, j:, m] = np.inf
                    break
    if not peak[0, end, room] <= room:
        raise Infeasible(f"{num_layers} layers do not fit in {memory}")
    return float(cost[0, end, room])
