"""The detectable difference of a group claim: power of the rule that prints *supported*, not of one t-test.

The rule is t over the fresh blocks after Holm's adjustment over the planned groups, at the level of this look; t over
all blocks; and the exact sign-flip test. `benchmarks/detectable.py` simulates it and prints `MULTIPLIERS`.
"""

from __future__ import annotations

import math

import numpy as np

BLOCKS = (6, 7, 8, 9, 10, 12, 14, 18, 24, 36, 60)
TESTS = (1, 2, 4, 7, 12, 28, 63, 252, 1000)
MULTIPLIERS = (
    (1.82, 1.88, 2.06, 2.28, 2.55, 3.08, 3.67, 4.84, 6.44),  # 6 blocks
    (1.39, 1.50, 1.73, 1.93, 2.13, 2.49, 2.90, 3.73, 4.69),  # 7 blocks
    (1.21, 1.34, 1.53, 1.69, 1.87, 2.14, 2.46, 3.00, 3.76),  # 8 blocks
    (1.12, 1.24, 1.39, 1.53, 1.65, 1.90, 2.17, 2.61, 3.15),  # 9 blocks
    (1.03, 1.15, 1.29, 1.41, 1.54, 1.72, 1.93, 2.29, 2.73),  # 10 blocks
    (0.90, 1.00, 1.14, 1.21, 1.31, 1.47, 1.64, 1.89, 2.22),  # 12 blocks
    (0.83, 0.92, 1.02, 1.10, 1.18, 1.31, 1.44, 1.64, 1.90),  # 14 blocks
    (0.71, 0.79, 0.87, 0.93, 1.00, 1.10, 1.20, 1.35, 1.51),  # 18 blocks
    (0.61, 0.67, 0.72, 0.79, 0.84, 0.91, 0.98, 1.10, 1.22),  # 24 blocks
    (0.49, 0.54, 0.59, 0.61, 0.66, 0.71, 0.77, 0.84, 0.92),  # 36 blocks
    (0.38, 0.41, 0.45, 0.47, 0.49, 0.54, 0.57, 0.63, 0.68),  # 60 blocks
)
"""Per number of fresh blocks, per number of tests: the true mean, in SDs of block differences, that is supported in
80 % of 4,000 simulated studies."""


def detectable(sd: float, blocks: int, tests: int) -> float | None:
    """Return about the smallest true mean that is supported in 80 % of repetitions; None if none can be.

    Args:
        sd: Standard deviation of the block differences.
        blocks: Fresh blocks. With fewer than six the sign-flip test cannot be below .05.
        tests: What the level .05 is divided by: planned groups, times the divisor of this look.

    Examples:
        >>> round(detectable(1.0, 7, 7), 2), detectable(1.0, 5, 7)
        (1.93, None)
    """
    if blocks < BLOCKS[0]:
        return None
    across = [np.interp(math.log(tests), np.log(TESTS), row) for row in MULTIPLIERS]
    scaled = np.interp(blocks, BLOCKS, np.sqrt(BLOCKS) * across)  # nearly constant in the number of blocks
    return sd * float(scaled) / math.sqrt(blocks)
