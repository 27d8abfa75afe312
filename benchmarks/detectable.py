"""How large must a true difference be for the rule that prints *supported*? Multiples of the SD of block differences.

python benchmarks/detectable.py              # print `MULTIPLIERS` of src/gatespace/evidence/power.py again
python benchmarks/detectable.py --draws 4000

One study: n fresh blocks and one of the selection seed, normal with the same true mean and SD 1. It is supported if t
over the fresh blocks is below .05 / tests (Holm's first step: no other group differs), t over all blocks is below .05
on the same side, and the sign-flip test of the fresh blocks is below .05. The multiple is the mean at which 80 % of
the draws are supported.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from scipy import stats

from gatespace.evidence.paired import POWER
from gatespace.evidence.power import BLOCKS, TESTS
from gatespace.evidence.reach import ALPHA
from gatespace.seeding import stream


def multiple(blocks: int, tests: int, draws: int = 2000) -> float:
    """Return the multiple of the SD that is supported in 80 % of `draws` studies, by bisection over the same draws."""
    random = np.random.default_rng(stream(0, "detectable", blocks, tests))
    noise = random.standard_normal((draws, blocks + 1))
    signs = _signs(blocks, random)
    low, high = 0.0, 16.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if supported(noise + middle, tests, signs) >= POWER else (middle, high)
    return high


def supported(differences: Any, tests: int, signs: Any) -> float:
    """Return the share of studies (rows; the first column is the selection seed's block) that are supported."""
    fresh = differences[:, 1:]
    p, mean = _t(fresh)
    p_all, mean_all = _t(differences)
    passed = (p < ALPHA / tests) & (p_all < ALPHA) & (mean * mean_all > 0)
    rest = fresh[passed]
    flips = np.abs(rest @ signs.T) >= np.abs(rest.sum(1))[:, None] - 1e-9
    return float((flips.mean(1) < ALPHA).sum()) / len(fresh)


def _t(values: Any) -> tuple[Any, Any]:
    mean, n = values.mean(1), values.shape[1]
    return 2 * stats.t.sf(np.abs(mean) / values.std(1, ddof=1) * np.sqrt(n), n - 1), mean


def _signs(n: int, random: Any) -> Any:
    """All assignments of signs up to a common factor; above 12 blocks, where t decides, a sample of 2,048."""
    if n > 12:
        return random.choice([-1.0, 1.0], (2**11, n))
    bits = np.arange(2 ** (n - 1))[:, None] >> np.arange(n) & 1
    return 1.0 - 2.0 * bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000, help="Simulated studies per cell.")
    draws = parser.parse_args().draws
    for blocks in BLOCKS:
        row = ", ".join(f"{multiple(blocks, tests, draws):.2f}" for tests in TESTS)
        print(f"    ({row}),  # {blocks} blocks", flush=True)


if __name__ == "__main__":
    main()
