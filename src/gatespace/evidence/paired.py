"""Two points over the same seeds: the paired t-test with its interval, and the exact sign-flip test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from gatespace.errors import UsageError
from gatespace.evidence.power import minimum_detectable
from gatespace.evidence.records import Paired, Summary
from gatespace.gating.coefficients import NotApplicable
from gatespace.seeding import stream

EXACT_UP_TO = 14
"""Up to so many differences all 2ⁿ assignments of signs are tried; above, a sample of them."""
SAMPLED_FLIPS = 19_999
FEW_SEEDS = 6
"""Below so many, no sign-flip test can reach .05: 2 / 2⁵ = .0625."""

_ROUNDING = 16 * np.finfo(float).eps


def paired(
    left: Mapping[int, float], right: Mapping[int, float], *, confidence: float = 0.95
) -> Paired | NotApplicable:
    """Compare two points at the seeds that both have.

    Args:
        left: Seed → value of the first point, e.g. accuracy in pp.
        right: Seed → value of the second.
        confidence: Of the interval.

    Example:
        >>> found = paired({42: 55.49, 2: 53.60, 3: 52.83}, {42: 51.28, 2: 53.50, 3: 51.95})
        >>> print(f"{found.mean:.2f} ± {found.sd:.2f}, p = {found.p:.2f}, [{found.low:.2f}, {found.high:.2f}]")
        1.73 ± 2.18, p = 0.30, [-3.69, 7.15]
        >>> found.sign_flip_p, found.sign_flip_floor
        (0.25, 0.25)
    """
    seeds = tuple(seed for seed in left if seed in right)
    if not seeds:
        return NotApplicable("no seed at which both points were run")
    # Accuracies of 70 and differences of 0.1: what is rounding follows from the former.
    tolerance = _ROUNDING * max(abs(side[seed]) for side in (left, right) for seed in seeds)
    raw = [left[seed] - right[seed] for seed in seeds]
    differences = [0.0 if abs(value) <= tolerance else value for value in raw]
    alone = len(set(left) ^ set(right))
    note = f"{alone} seed{'s' * (alone > 1)} with one of the two runs only" if alone else ""
    found = summarise(differences, confidence=confidence, unit="seed", note=note, tolerance=tolerance)
    return Paired(**vars(found), seeds=seeds, differences=tuple(differences))


def summarise(
    differences: Sequence[float],
    *,
    confidence: float = 0.95,
    unit: str = "seed",
    note: str = "",
    tolerance: float = 0.0,
) -> Summary:
    """Mean, t with its interval, sign-flip p and minimum detectable difference of some differences.

    Args:
        differences: At least one.
        confidence: Of the interval.
        unit: What one of them is, for the note.
        note: Goes before what is to be said here.
        tolerance: A mean or an SD that is not above it is 0: the rounding of what was subtracted.
    """
    values = np.asarray(differences, dtype=float)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise UsageError("differences are a list of finite numbers, at least one", got=list(differences))
    if not 0 < confidence < 1:
        raise UsageError("a confidence lies between 0 and 1", got=confidence)
    n = int(values.size)
    tolerance = max(tolerance, _ROUNDING * float(np.abs(values).max()))
    mean = float(values.mean())
    notes = [note] if note else []
    sd = t = p = low = high = flip = mde = None
    if n == 1:
        notes.append(f"one {unit}: a difference without a measure of its error")
    else:
        sd = float(values.std(ddof=1))
        flip = sign_flip(values)
        if sd <= tolerance:
            sd = 0.0
            notes.append(f"all {n} {unit}s give the same difference: without variance there is no t")
        else:
            test = stats.ttest_1samp(values, 0.0)  # what ttest_rel does with its two sides
            interval = test.confidence_interval(confidence)
            t, p, low, high = map(float, (test.statistic, test.pvalue, interval.low, interval.high))
            mde = minimum_detectable(sd, n)
        if n < FEW_SEEDS:
            notes.append(f"with {n} {unit}s no sign-flip p is below {2 / 2**n:.4g}")
        if n > EXACT_UP_TO:
            notes.append(f"sign-flip p from {SAMPLED_FLIPS} random assignments of signs")
    return Summary(
        n=n,
        mean=0.0 if abs(mean) <= tolerance else mean,
        sd=sd,
        t=t,
        p=p,
        low=low,
        high=high,
        sign_flip_p=flip,
        sign_flip_floor=min(1.0, 2.0 / 2.0**n),
        mde=mde,
        wins=int((values > 0).sum()),
        ties=int((values == 0).sum()),
        losses=int((values < 0).sum()),
        confidence=confidence,
        note="; ".join(notes),
    )


def sign_flip(differences: Any) -> float:
    """Two-sided p of the mean under all 2ⁿ assignments of signs, each as likely where left and right are alike."""
    values = np.asarray(differences, dtype=float)
    scale = float(np.abs(values).max())
    if scale == 0:
        return 1.0

    def mean(sample: Any, axis: int) -> Any:
        # rounded, so that assignments with equal sums are equal whatever the order of addition
        return np.round(np.mean(sample, axis=axis), 11)

    exact = values.size <= EXACT_UP_TO
    test = stats.permutation_test(
        (values / scale,),
        mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf if exact else SAMPLED_FLIPS,
        rng=None if exact else np.random.default_rng(stream(0, "sign-flip", int(values.size))),
        alternative="two-sided",
    )
    return float(test.pvalue)
