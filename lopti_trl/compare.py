"""Statistics over seeds: intervals of a mean, and paired differences between methods."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float, float]:
    """Mean, standard deviation (ddof 1) and Student's interval of the mean; nan over one value."""
    values = np.asarray(values, dtype=float)
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return mean, math.nan, math.nan, math.nan
    std = float(values.std(ddof=1))
    half = float(stats.t.ppf((1 + level) / 2, count - 1)) * std / math.sqrt(count)
    return mean, std, mean - half, mean + half


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[str, float]:
    """Difference ours - theirs over the seeds that both have: mean, 95 % interval and p value.

    p is of the two-sided paired t-test; nan with fewer than two seeds or without any spread.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return {
            "pairs": 0,
            "difference": math.nan,
            "low": math.nan,
            "high": math.nan,
            "p": math.nan,
        }
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    mean, std, low, high = interval(differences)
    p = math.nan
    if len(seeds) > 1 and std > 0:
        p = 2 * float(stats.t.sf(abs(mean) / (std / math.sqrt(len(seeds))), len(seeds) - 1))
    return {"pairs": len(seeds), "difference": mean, "low": low, "high": high, "p": p}


def markdown(table: pd.DataFrame, digits: int = 4) -> str:
    """A table without its index as Markdown, floats with so many significant digits."""
    lines = ["| " + " | ".join(table.columns) + " |", "|---" * len(table.columns) + "|"]
    for row in table.itertuples(index=False):
        cells = (f"{v:.{digits}g}" if isinstance(v, float) else str(v) for v in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summarise(results: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """From one row a run and metric (method, seed, metric, value) to one a method and metric.

    Columns: method, metric, seeds, mean, std, low, high (95 %), and against the baseline on the
    same seeds: pairs, difference, difference_low, difference_high, p. Methods keep their order.
    """
    rows = []
    for metric in results["metric"].unique():
        chosen = results[results["metric"] == metric]
        by_method = {
            method: dict(zip(group["seed"], group["value"], strict=True))
            for method, group in chosen.groupby("method", sort=False)
        }
        for method, values in by_method.items():
            mean, std, low, high = interval(list(values.values()))
            row = {"method": method, "metric": metric, "seeds": len(values)}
            row |= {"mean": mean, "std": std, "low": low, "high": high}
            difference = paired(values, {} if method == baseline else by_method.get(baseline, {}))
            row |= {"pairs": difference["pairs"], "difference": difference["difference"]}
            row |= {"difference_low": difference["low"], "difference_high": difference["high"]}
            rows.append(row | {"p": difference["p"]})
    return pd.DataFrame(rows)
