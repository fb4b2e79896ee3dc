"""The report of one or several runs: charts, tables, samples, as one HTML file and for a paper."""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd

from lopti_trl.compare import interval, summarise
from lopti_trl.figures import Chart, bar_chart, heat_map, line_chart

TEMPLATES = Path(__file__).parent / "templates"
QUANTITIES = {  # under prob/, per band of pi_old
    "grad_share": ("Share of the gradient", "share of the logit-gradient norm (%)", 100),
    "token_share": ("Share of the tokens", "share of valid tokens (%)", 100),
    "advantage_share": ("Share of the advantage", "share of |advantage| (%)", 100),
    "entropy": ("Entropy", "entropy (nats)", 1),
    "change": ("Change of probability since the rollout", "mean pi - pi_old (points)", 100),
    "clip_ratio": ("Clipped tokens", "share of trained tokens (%)", 100),
    "rose": ("Tokens with positive advantage that rose", "share that rose (%)", 100),
    "tied": ("Tokens with positive advantage that stayed", "share without any change (%)", 100),
}
BASELINE = "GRPO"


@dataclass
class Run:
    """What a run's folder holds, and what it lacks."""

    folder: Path
    metrics: dict = field(default_factory=dict)
    log: list[dict] = field(default_factory=list)
    analysis: pd.DataFrame | None = None
    facts: dict = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    label: str = ""  # of its method, told apart from those of other runs

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def plan(self) -> dict:
        return self.metrics.get("plan", {})

    @property
    def config(self) -> dict:
        return self.metrics.get("config", {})

    @property
    def seed(self) -> int:
        """From the config, else from a folder name that ends in a number."""
        number = re.search(r"(\d+)$", self.name)
        return self.config.get("seed", int(number[1]) if number else 0)

    @property
    def accuracy(self) -> dict[str, float]:
        """After training, by puzzle size or benchmark: greedy, or whatever was measured first."""
        settings = self.metrics.get("evaluation", {}).get("after", {})
        return settings.get("greedy") or next(iter(settings.values()), {})

    def curve(self, key: str, scale: float = 1.0) -> pd.Series:
        """A logged value by rollout batch; several logs of a batch are averaged."""
        rows, batch = [], None
        for row in self.log:
            batch = row.get("rollout_batches", batch)
            if row.get(key) is not None and batch is not None:
                rows.append((int(batch), row[key] * scale))
        frame = pd.DataFrame(rows, columns=["batch", "value"])
        return frame.groupby("batch")["value"].mean()


def load_run(folder: Path | str) -> Run:
    """Reads what is there; whatever is not is named in `missing`, never an error."""
    run = Run(Path(folder))
    if not run.folder.is_dir():
        run.missing.append("everything: there is no such folder")
        return run
    try:
        run.metrics = json.loads((run.folder / "metrics.json").read_text())
    except FileNotFoundError:
        run.missing.append("metrics.json (plan, versions, evaluation)")
    except ValueError:
        run.missing.append("a readable metrics.json: it is cut short or not JSON")
    if (run.folder / "sweep.json").is_file():
        run.label = json.loads((run.folder / "sweep.json").read_text())["method"]
    run.log = run.metrics.get("log") or read_log(run.folder / "metrics.jsonl")
    if "log" not in run.metrics:
        batches = max((row.get("rollout_batches", 0) for row in run.log), default=0)
        run.missing.append(f"the end of training: the log stops after {batches:g} rollout batches")
    if not run.accuracy:
        run.missing.append("the evaluation after training")
    if not run.config:
        run.missing.append("the config (runs from before it was recorded)")
    if not any(key.startswith("prob/") for row in run.log for key in row):
        run.missing.append("diagnostics per band: train with --diagnostics true")
    try:
        run.facts = json.loads((run.folder / "analysis" / "analysis.json").read_text())
        run.analysis = pd.read_parquet(run.folder / "analysis" / "analysis.parquet")
    except (OSError, ValueError):
        run.missing.append("figures 1, 3, 5 and samples: lopti-trl analyze RUN")
    return run


def read_log(path: Path) -> list[dict]:
    """Rows of a metrics.jsonl; a killed run may have cut the last one."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def name_methods(runs: list[Run]) -> None:
    """Label runs by a sweep's name or the method; the number of steps tells apart those alike."""
    steps = {}
    for run in runs:
        count = run.plan.get("optimizer_steps_per_rollout_batch")
        run.label = run.label or run.plan.get("method", run.name)
        steps.setdefault(run.label, set()).add(count)
    for run in runs:
        if len(steps[run.label]) > 1:
            count = run.plan.get("optimizer_steps_per_rollout_batch")
            if count != min(c for c in steps[run.label] if c is not None):
                run.label += f", {count:g} steps a batch"


def by_method(runs: list[Run]) -> dict[str, list[Run]]:
    """Baseline first, then by name."""
    labels = sorted({run.label for run in runs}, key=lambda label: (label != BASELINE, label))
    return {label: [run for run in runs if run.label == label] for label in labels}


def results_of(runs: list[Run]) -> pd.DataFrame:
    """One row a run and metric, as `compare.summarise` takes them."""
    rows = []
    for run in (run for group in by_method(runs).values() for run in group):
        values = {
            f"accuracy, {setting}, {moment} (%)": 100 * accuracy["average"]
            for moment, settings in run.metrics.get("evaluation", {}).items()
            for setting, accuracy in settings.items()
            if "average" in accuracy
        }
        reward = run.curve("reward")
        if len(reward) and "log" in run.metrics:  # else training is not at its last tenth
            values["reward, last tenth of training"] = reward.tail(max(len(reward) // 10, 1)).mean()
        rows += [(run.label, run.seed, metric, value) for metric, value in values.items()]
    return pd.DataFrame(rows, columns=["method", "seed", "metric", "value"])


def spread(curves: list[pd.Series]) -> pd.DataFrame:
    """Mean and mean -+ standard deviation over seeds, at every place that any curve has."""
    table = pd.concat(curves, axis=1)
    mean, std = table.mean(axis=1), table.std(axis=1)
    return pd.DataFrame({"mean": mean, "low": mean - std, "high": mean + std}).dropna(
        subset=["mean"]
    )


def curve_charts(runs: list[Run]) -> Iterator[Chart]:
    """Reward, accuracy of rollouts, length and entropy over training."""
    for name, key, title, label, scale in (
        ("reward", "reward", "Reward", "mean reward of a rollout batch", 1),
        ("correct", "kk/correct", "Correct rollouts", "correct completions (%)", 100),
        ("length", "completions/mean_length", "Completion length", "mean length (tokens)", 1),
        ("entropy", "entropy", "Entropy", "mean entropy (nats)", 1),
    ):
        series = {
            label_: spread(curves)
            for label_, group in by_method(runs).items()
            if (curves := [c for run in group if len(c := run.curve(key, scale))])
        }
        if series:
            seeds = max(len(group) for group in by_method(runs).values())
            note = "Shaded: standard deviation over seeds." if seeds > 1 else "One seed."
            yield line_chart(name, title, "rollout batch", label, series, note)


def accuracy_charts(runs: list[Run]) -> Iterator[Chart]:
    """Held-out accuracy after training by puzzle size, and against alpha and eta [Fig 6]."""
    frames = {part: {} for part in ("mean", "low", "high")}
    for label, group in by_method(runs).items():
        found = [run.accuracy for run in group if run.accuracy]
        for size in found[0] if found else ():
            mean, _, low, high = interval([100 * marks[size] for marks in found if size in marks])
            for part, value in (("mean", mean), ("low", low), ("high", high)):
                frames[part].setdefault(label, {})[size] = value
    tables = {part: pd.DataFrame(values) for part, values in frames.items()}
    if len(tables["mean"]):
        yield bar_chart(
            "accuracy",
            "Held-out accuracy after training",
            "number of people or benchmark",
            "accuracy (%)",
            *tables.values(),
            note="Bars: 95 % interval of the mean over seeds.",
        )
    for key, symbol in (("ar_alpha", "alpha"), ("lopti_eta", "eta")):
        rows = {}
        for run in runs:
            if run.config.get(key) and "average" in run.accuracy:
                rows.setdefault(run.config[key], []).append(100 * run.accuracy["average"])
        if len(rows) > 1:
            parts = {value: interval(marks) for value, marks in sorted(rows.items())}
            data = pd.DataFrame(
                {"mean": p[0], "low": p[2], "high": p[3]} for p in parts.values()
            ).set_index(pd.Index(parts))
            yield line_chart(
                f"sweep_{symbol}",
                f"Accuracy against {symbol} (paper's figure 6)",
                symbol,
                "accuracy (%)",
                {key: data},
                "Over all runs with that value; shaded: 95 % interval over runs.",
            )


def diagnostics_charts(label: str, runs: list[Run]) -> Iterator[Chart]:
    """The live diagnostics of one method, a line a band."""
    names = {key for run in runs for row in run.log for key in row if key.startswith("prob/")}
    for quantity, (title, unit, scale) in QUANTITIES.items():
        bands = sorted(
            (name.split("/")[2] for name in names if name.startswith(f"prob/{quantity}/")),
            key=lambda band: float(band.split("-")[0]),
        )
        series = {
            band: spread(curves)
            for band in bands
            if (
                curves := [
                    c for run in runs if len(c := run.curve(f"prob/{quantity}/{band}", scale))
                ]
            )
        }
        if series:
            name = f"prob_{quantity}_{slug(label)}"
            yield line_chart(name, f"{title}, by band", "rollout batch", unit, series)


def pivot(frame: pd.DataFrame, figure: str) -> tuple[pd.DataFrame, ...]:
    """Mean, mean - std and mean + std over batches: x down, series across."""
    rows = frame[frame["figure"] == figure]
    order = {axis: list(dict.fromkeys(rows[axis])) for axis in ("x", "series")}
    groups = rows.groupby(["x", "series"])["value"]
    mean, std = groups.mean(), groups.std()
    return tuple(
        values.unstack().reindex(index=order["x"], columns=order["series"])
        for values in (mean, mean - std, mean + std)
    )


def analysis_charts(frame: pd.DataFrame, facts: dict) -> Iterator[Chart]:
    """Figures 1, 3 and 5, the theory check, cosines and layers of one `analyze`."""
    batches = frame["batch"].nunique()
    note = f"Bars: standard deviation over {batches} rollout batches."
    note = note if batches > 1 else "One rollout batch."
    band, rate = "band of pi_old", facts["settings"]["probe_lr"]

    def chart(
        figure, name, title, ylabel, scale=1.0, xlabel=band, series=None, x=None, more="", **options
    ):
        tables = [table * scale for table in pivot(frame, figure)]
        if series:
            tables = [table[[s for s in series if s in table.columns]] for table in tables]
        if x:
            tables = [table.reindex([v for v in x if v in table.index]) for table in tables]
        return bar_chart(name, title, xlabel, ylabel, *tables, note=note + more, **options)

    bands, made = facts["bands"], set(frame["figure"])

    def change(name, title, trained):
        label = "mean change of probability (points)"
        more = f" After one SGD step of {rate:g}."
        return chart("change", name, title, label, 100, series=[trained], reference=0, more=more)

    if "change" in made:
        yield chart("tokens", "tokens", "1 a. Tokens", "share of valid tokens (%)", 100)
        yield chart("advantage", "advantage", "1 b. Advantages", "advantage", reference=0)
        yield change("change", "1 c. Change, all tokens trained", "all")
        yield chart(
            "gradient norm",
            "gradient_norm",
            "1 d. Gradient of one band's tokens",
            "L2 norm over all parameters",
            xlabel="tokens trained",
        )
        yield change("change_lowest", "1 e. Change, lowest band trained", bands[0])
        yield change("change_highest", "1 f. Change, highest band trained", bands[-1])
    if "rose" in made:
        for name, title, label in (
            (
                "rose",
                "3. Tokens with positive advantage that rose",
                "share with pi_new > pi_old (%)",
            ),
            ("tied", "3. Ties: not a bit of change", "share with pi_new = pi_old (%)"),
        ):
            yield chart(name, name, title, label, 100, x=bands)
    if "cosine" in made:
        yield heat_map(
            "cosine",
            "Cosine between gradients",
            "cosine",
            pivot(frame, "cosine")[0],
            "Mean over batches.",
        )
        yield chart(
            "layers",
            "layers",
            "Gradient by layer",
            "L2 norm in the layer",
            xlabel="layer",
            series=["low", "high", "all"],
        )
    if "gain" in made:
        rows = frame[(frame["figure"] == "gain") & frame["x"].isin(["5 %", "median", "95 %"])]
        tables = rows.pivot_table(index="series", columns="x", values="value", sort=False)
        yield line_chart(
            "gain",
            "From logits back to each layer's output",
            "layer",
            "gradient norm over logit-gradient norm",
            {"median": tables.set_axis(["low", "mean", "high"], axis=1)},
            "Shaded: 5 to 95 % of the tokens. Narrow means that 1 - pi alone decides.",
        )
    if language := {k: v for k, v in facts["language"].items() if v["r"]}:
        parts = [
            pd.DataFrame({"r": {name: v["r"][key] for name, v in language.items()}})
            for key in ("value", "low", "high")
        ]
        yield bar_chart(
            "language",
            "5. Words and reward",
            "word class",
            "Pearson r with the reward",
            *parts,
            note="Bars: 95 % bootstrap interval over completions.",
            reference=0,
        )


def save_analysis_figures(frame: pd.DataFrame, facts: dict, folder: Path) -> None:
    for chart in analysis_charts(frame, facts):
        chart.save(folder)


def theory_rows(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """What the checks of an analysis found, in words and numbers."""
    rows = []
    if "bound" in set(frame["figure"]):
        mean, *_ = pivot(frame, "bound")
        found, theory = mean["found"], mean["theory"]
        ratio = "||d log pi / d logits|| / (1 - pi)"
        rows = [
            (f"{ratio}, lowest", f"{found['lowest']:.4f}, bound {theory['lowest']:.4f}"),
            (f"{ratio}, highest", f"{found['highest']:.4f}, bound {theory['highest']:.4f}"),
            ("tokens within the bound", f"{100 * found['share within']:.2f} %"),
        ]
    errors = frame[frame["figure"] == "sum error"]
    return rows + [
        (f"relative error of the sum over {split}", f"{group['value'].max():.1e}")
        for split, group in errors.groupby("series")
    ]


def slug(text: str) -> str:
    return re.sub(r"\W+", "_", text.lower()).strip("_")


def shade(sample: dict) -> list[dict]:
    """Tokens of a sample with their shades in [0, 1]: rarity, and gradient over the largest."""
    largest = max(sample["grad_shares"], default=0) or 1
    return [
        {"text": token, "prob": p, "share": g, "rarity": 1 - p, "pull": g / largest}
        for token, p, g in zip(
            sample["tokens"], sample["probs"], sample["grad_shares"], strict=True
        )
    ]


def comparison(runs: list[Run]) -> pd.DataFrame:
    results = results_of(runs)
    labels = list(by_method(runs))
    return summarise(results, BASELINE if BASELINE in labels else labels[0])


def build(runs: list[Run], title: str) -> dict:
    """Everything that the templates show."""
    if not runs:
        raise ValueError("No run to report on. Give the folders of runs, as `train` wrote them.")
    name_methods(runs)
    groups = by_method(runs)
    lacking = {}
    for run in runs:
        for text in run.missing:
            lacking.setdefault(text, []).append(run.name)
    notes = [
        f"in {'every run' if len(names) == len(runs) > 1 else ', '.join(names)}: {text}"
        for text, names in lacking.items()
    ]
    if all(len(group) == 1 for group in groups.values()):
        notes.append("a second seed of any method, for intervals and tests")
    sections = [
        ("Training", list(curve_charts(runs))),
        ("Held-out accuracy", list(accuracy_charts(runs))),
        *(
            (f"Diagnostics: {label}", list(diagnostics_charts(label, g)))
            for label, g in groups.items()
        ),
    ]
    analyses = [run for run in runs if run.analysis is not None]
    checks = {}
    for run in analyses:
        charts = list(analysis_charts(run.analysis, run.facts))
        for chart in charts:
            chart.name = f"{slug(run.name)}_{chart.name}"
        sections.append((f"Analysis: {run.name}", charts))
        checks[run.name] = theory_rows(run.analysis)
    configs = {run.name: run.config for run in runs if run.config}
    keys = sorted({key for config in configs.values() for key in config})
    differing = [k for k in keys if len({str(c.get(k)) for c in configs.values()}) > 1]
    return {
        "title": title,
        "runs": runs,
        "notes": notes,
        "table_rows": comparison(runs).to_dict("records"),
        "baseline": BASELINE if BASELINE in groups else next(iter(groups)),
        "sections": [(name, charts) for name, charts in sections if charts],
        "checks": checks,
        "samples": [
            (run.name, sample, shade(sample)) for run in analyses for sample in run.facts["samples"]
        ],
        "configs": configs,
        "config_keys": keys,
        "differing": differing,
        "versions": {run.name: run.metrics.get("versions", {}) for run in runs},
    }


def number(value, digits: int = 3) -> str:
    return "" if value is None or np.isnan(value) else f"{value:.{digits}f}"


def with_interval(row: dict, value: str, low: str, high: str) -> str:
    if np.isnan(row[value]):
        return ""
    ends = "" if np.isnan(row[low]) else f" [{row[low]:.2f}, {row[high]:.2f}]"
    return f"{row[value]:.2f}{ends}"


def write_report(folders: list[str], output: Path, title: str, figures: bool = True) -> Path:
    """OUTPUT (HTML), the same name with .md, and OUTPUT's stem as a folder of PNG and PDF."""
    content = build([load_run(folder) for folder in folders], title)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": number, "slug": slug}
    environment.globals["with_interval"] = with_interval
    output.parent.mkdir(parents=True, exist_ok=True)
    for template, path in (("html", output), ("md", output.with_suffix(".md"))):
        page = environment.get_template(f"report.{template}.j2").render(content)
        path.write_text(page, encoding="utf-8")
    if figures:
        for _, charts in content["sections"]:
            for chart in charts:
                chart.save(output.parent / f"{output.stem}_figures")
    return output


def main(args: list[str]) -> Path:
    parser = argparse.ArgumentParser(
        prog="lopti-trl report", description="One self-contained HTML file about runs of `train`."
    )
    parser.add_argument("runs", nargs="+", help="folders of runs; several seeds of a method too")
    parser.add_argument("--output", default="report.html", help="HTML file to write")
    parser.add_argument("--title", default="Training report")
    parser.add_argument("--no_figures", action="store_true", help="no PNG and PDF files")
    known = parser.parse_args(args)
    return write_report(known.runs, Path(known.output), known.title, not known.no_figures)
