"""What samples say about a model: avg@k, pass@k, maj@k and 95 % intervals, as pure functions.

n = samples of a prompt, c = correct ones, k = samples that a metric is about.
"""

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist, fmean

import numpy as np

Z = NormalDist().inv_cdf(0.975)
RESAMPLES = 4000  # the ends of an interval then move by about 2 % of its width


def avg_at_k(correct: Sequence[bool]) -> float:
    """Mean over all n samples: the mean of avg@k over every choice of k of them."""
    return fmean(correct)


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """Chance that k of the n samples hold a correct one: 1 - C(n - c, k) / C(n, k).

    Unbiased for any n >= k (Chen et al., arXiv 2107.03374, equation 1).
    """
    n, c = len(correct), sum(correct)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(correct: Sequence[bool], votes: Sequence[Hashable | None], k: int) -> float:
    """Chance that the most frequent answer of k samples is correct, ties broken by lot.

    Mean over the n // k groups of k samples in their order. A vote of None, a completion without
    an answer, does not count; a group without any vote is wrong.
    """
    return fmean(
        _majority(correct[start : start + k], votes[start : start + k])
        for start in range(0, len(votes) - k + 1, k)
    )


def _majority(correct: Sequence[bool], votes: Sequence[Hashable | None]) -> float:
    marks: dict[Hashable, list[bool]] = {}
    for mark, vote in zip(correct, votes, strict=True):
        if vote is not None:
            marks.setdefault(vote, []).append(mark)
    most = max(map(len, marks.values()), default=0)
    return fmean(fmean(m) for m in marks.values() if len(m) == most) if marks else 0.0


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927): never empty, also at 0 and n successes."""
    centre = (successes + Z**2 / 2) / (n + Z**2)
    half = Z / (n + Z**2) * math.sqrt(successes * (n - successes) / n + Z**2 / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(groups: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean of the groups' means, prompts redrawn in each group."""
    rng = np.random.default_rng(seed)
    means = np.mean([_resampled_means(np.asarray(g, dtype=float), rng) for g in groups], axis=0)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _resampled_means(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    n = len(scores)
    rows = max(1, 1_000_000 // n)  # at a time, for memory
    counts = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    return np.concatenate([scores[rng.integers(n, size=(c, n))].mean(axis=1) for c in counts])


def interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the mean of the groups' means; each prompt has one score in [0, 1].

    Wilson where every score is 0 or 1, as of single samples, and the groups are of one size, so
    that theirs is the mean of all; else by bootstrap over prompts.
    """
    scores = [score for group in groups for score in group]
    if set(scores) <= {0, 1} and len({len(group) for group in groups}) == 1:
        return wilson(sum(scores), len(scores))
    return bootstrap(groups)
