"""Every claim of docs/study tested, from what sweep and analyze wrote: tables in Markdown.

python scripts/study_claims.py outputs/study_analysis/analysis
"""

import json
import sys
from pathlib import Path

import pandas as pd

from lopti_trl.compare import interval, markdown, paired
from lopti_trl.report import load_run
from lopti_trl.sweep import load_sweep, results

STUDY = Path(__file__).parent.parent / "docs" / "study"
LOWEST, HIGHEST = "0-0.25", "0.75-1"
AR, LOPTI, BOTH = "AR, ar_alpha 0.3", "Lopti, lopti_eta 0.5", "AR + Lopti"


def show(title: str, table: pd.DataFrame) -> None:
    print(f"\n**{title}**\n\n{markdown(table, digits=3)}", end="")


def difference(claim: str, ours: dict, theirs: dict) -> dict:
    """A row: means of both, their paired difference, its interval, effect size and p."""
    test, both = paired(ours, theirs), ours.keys() & theirs.keys()
    _, std, *_ = interval([ours[key] - theirs[key] for key in both])
    return {
        "claim": claim,
        "first": interval([ours[key] for key in both])[0],
        "second": interval([theirs[key] for key in both])[0],
        "difference [95 %]": f"{test['difference']:+.3g} [{test['low']:.3g}, {test['high']:.3g}]",
        "effect size d": test["difference"] / std if std else float("nan"),
        "p": test["p"],
        "pairs": test["pairs"],
    }


def of_analysis(folder: Path) -> None:
    """Figures 1, 3 and 5 of one `analyze`, its rollout batches as pairs."""
    frame = pd.read_parquet(folder / "analysis.parquet")
    facts = json.loads((folder / "analysis.json").read_text())

    def values(figure: str, series: str, x: str) -> dict[int, float]:
        chosen = frame[(frame["figure"] == figure) & (frame["series"] == series)]
        chosen = chosen[chosen["x"] == x]
        return dict(zip(chosen["batch"], chosen["value"], strict=True))

    def moved(trained: str) -> dict[int, float]:
        """Mean |change| over all tokens, from the bands' means and their shares."""
        parts = [
            (values("tokens", "share", band), values("change size", trained, band))
            for band in facts["bands"]
        ]
        return {
            batch: sum(share[batch] * size.get(batch, 0.0) for share, size in parts)
            for batch in parts[0][0]
        }

    rows = [
        difference(
            "1 d: gradient norm, lowest band - highest band",
            values("gradient norm", "norm", LOWEST),
            values("gradient norm", "norm", HIGHEST),
        ),
        difference(
            "1 b: mean size of the advantage, lowest band - highest band",
            values("advantage", "mean size", LOWEST),
            values("advantage", "mean size", HIGHEST),
        ),
        difference(
            "1 e, f: mean change of a token's probability, lowest trained - highest trained",
            moved(LOWEST),
            moved(HIGHEST),
        ),
    ]
    rows += [
        difference(
            f"3: share of highest-band tokens with A > 0 that rise, {method} - {control}",
            values("rose", method, HIGHEST),
            values("rose", control, HIGHEST),
        )
        for method in ("AR", "Lopti", "AR + Lopti")
        for control in ("GRPO", "GRPO, two steps")
    ]
    show("One update from the same state and rollouts (pairs: rollout batches)", pd.DataFrame(rows))
    rose = frame[frame["figure"] == "rose"].pivot_table(
        index="series", columns="x", values="value", aggfunc="mean", sort=False
    )
    show("Figure 3 in numbers: share that rose, by band", rose.reset_index())
    norms = frame[frame["figure"] == "gradient norm"].groupby("x", sort=False)["value"]
    table = pd.DataFrame({"mean": norms.mean(), "std": norms.std()}).reset_index()
    show("Figure 1 d in numbers: gradient norm", table)
    words = [
        {"class": name, "per 1,000 tokens": entry["per_1000_tokens"], **entry["r"]}
        for name, entry in facts["language"].items()
        if entry["r"]
    ]
    if words:
        show("Figure 5: words and reward, Pearson r with 95 % interval", pd.DataFrame(words))


def of_sweep(file: Path, pairs: list[tuple[str, str]], metrics: list[str]) -> None:
    """Means over seeds, and pairs of methods compared on the seeds that both have."""
    sweep = load_sweep(file)
    table = results(sweep)

    def values(method: str, metric: str) -> dict[int, float]:
        chosen = table[(table["method"] == method) & (table["metric"] == metric)]
        return dict(zip(chosen["seed"], chosen["value"], strict=True))

    means = table[table["metric"].isin(metrics)].groupby(["method", "metric"], sort=False)["value"]
    text = means.agg(lambda v: f"{v.mean():.3f} +- {v.std():.3f} ({len(v)})").unstack()
    show(
        f"{file.stem}: mean +- standard deviation (seeds)",
        text.reindex(index=list(sweep.methods), columns=metrics).reset_index(),
    )
    rows = [
        difference(f"{metric}: {one} - {other}", values(one, metric), values(other, metric))
        for metric in metrics
        for one, other in pairs
    ]
    show(f"{file.stem}: paired by seed", pd.DataFrame(rows))


def of_training(file: Path, pairs: list[tuple[str, str]]) -> None:
    """Figure 3 during training: mean of prob/rose over the rollout batches of a run."""
    sweep = load_sweep(file)
    rose = {method: {} for method in sweep.methods}
    for method, seed in sweep.runs:
        curve = load_run(sweep.folder(method, seed)).curve(f"prob/rose/{HIGHEST}")
        if len(curve):
            rose[method][seed] = float(curve.mean())
    claim = "share of highest-band tokens with A > 0 that rise"
    rows = [difference(f"{claim}: {one} - {other}", rose[one], rose[other]) for one, other in pairs]
    show("Figure 3 over all of training (pairs: seeds)", pd.DataFrame(rows))


def main(analysis: Path) -> None:
    metrics = ["greedy after", "avg@4 after", "reward, last tenth"]
    equal_data = [(method, "GRPO") for method in ("GRPO, two steps", AR, LOPTI, BOTH)]
    equal_steps = [(method, "GRPO, two steps") for method in (LOPTI, BOTH)]
    of_sweep(STUDY / "sweep.yaml", equal_data + equal_steps, metrics)
    of_training(STUDY / "sweep.yaml", equal_data + equal_steps)
    swept = [f"AR, ar_alpha {alpha}" for alpha in (0.1, 0.3, 0.6)]
    swept += [f"Lopti, lopti_eta {eta}" for eta in (0.3, 0.5, 0.7)]
    pairs = [("Lopti, high first", LOPTI)]
    pairs += [(method, "GRPO") for method in ("Lopti, high first", "rare tokens only", *swept)]
    of_sweep(STUDY / "ablations.yaml", pairs, metrics)
    pairs = [
        ("DIW", "GRPO"),
        *((f"DIW, {name}", "DIW") for name in ("static weights", "no reference", "fixed tau")),
    ]
    of_sweep(STUDY / "diw.yaml", pairs, ["greedy after", "sampled after", "reward, last tenth"])
    of_analysis(analysis)


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "outputs/study_analysis/analysis"))
