"""Which kinds of words come with reward: frequencies of word classes in completions.

n = completions. Source: arXiv 2505.12929, figure 5.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

WORDS = Path(__file__).parent / "words_en.yaml"


def load_word_classes(path: Path | str = WORDS) -> dict[str, re.Pattern]:
    """A pattern a class from a YAML of `name: {words: [...]}`; ValueError names a class without."""
    patterns = {}
    for name, entry in yaml.safe_load(Path(path).read_text(encoding="utf-8")).items():
        words = entry.get("words") if isinstance(entry, dict) else None
        if not words:
            raise ValueError(
                f"{path}: the word class {name!r} has no words. Write "
                f"`{name}: {{words: [so, thus]}}`."
            )
        endings = (re.escape(word).replace(r"\*", r"\w*").replace(r"\ ", r"\s+") for word in words)
        patterns[name] = re.compile(rf"\b(?:{'|'.join(endings)})\b", re.IGNORECASE)
    return patterns


def word_frequencies(
    text: str, num_tokens: int, classes: dict[str, re.Pattern]
) -> dict[str, float]:
    """Occurrences of each class per 1,000 tokens of a completion (which leaves the puzzle out)."""
    return {
        name: 1000 * len(pattern.findall(text)) / max(num_tokens, 1)
        for name, pattern in classes.items()
    }


def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Correlation over the last axis, nan where a side is constant."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    scale = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.divide((x * y).sum(-1), scale, out=np.full_like(scale, np.nan), where=scale > 1e-12)


def reward_correlation(
    frequencies: Sequence[float],  # n
    rewards: Sequence[float],  # n
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float] | None:
    """Pearson r with its 95 % interval by percentile bootstrap over completions.

    None if either is constant. Resamples in which one is do not count.
    """
    x, y = np.asarray(frequencies, dtype=float), np.asarray(rewards, dtype=float)
    r = float(pearson(x, y)) if len(x) > 1 else np.nan
    if np.isnan(r):
        return None
    index = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    sampled = pearson(x[index], y[index])
    low, high = np.quantile(sampled[~np.isnan(sampled)], (0.025, 0.975))
    return r, float(low), float(high)
