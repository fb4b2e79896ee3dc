"""Charts for reports and papers: one matplotlib figure each, as SVG that follows the page's theme.

Every chart has a title, axis labels with units, a text alternative and the table it shows.
"""

import html
import itertools
import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure  # no pyplot: no window, no global state
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, told apart by most colour-blind eyes; the page may replace each one
PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b"]
INK = "#010203"  # becomes the page's text colour
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#888888",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "axes.titlesize": "medium",
    "savefig.transparent": True,
    "axes.prop_cycle": mpl.cycler(color=PALETTE),
}
SIZE = (4.6, 3.4)  # inches: legible at the width of a phone
MARKERS = "osD^vPX*"


@dataclass
class Chart:
    """A figure with what makes it readable without seeing it."""

    name: str  # of its files
    title: str
    alt: str
    table: pd.DataFrame  # the numbers shown, rows labelled by the index
    figure: Figure
    note: str = ""

    def save(self, folder: Path) -> None:
        """NAME.png at 200 dpi and NAME.pdf."""
        folder.mkdir(parents=True, exist_ok=True)
        for ending in ("png", "pdf"):
            # a fixed date: the same numbers give the same file
            metadata = {"CreationDate": None} if ending == "pdf" else {}
            self.figure.savefig(
                folder / f"{self.name}.{ending}", dpi=200, transparent=False, metadata=metadata
            )

    def svg(self) -> str:
        """Inline SVG with a name for assistive technology, in the page's colours."""
        file = StringIO()
        # identifiers are drawn from the salt: two charts on a page must not share any
        with mpl.rc_context(STYLE | {"svg.hashsalt": self.name}):
            self.figure.savefig(file, format="svg", metadata={"Date": None})
        text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r' width="[^"]*pt"', "", text, count=1)
        text = re.sub(r' height="[^"]*pt"', "", text, count=1)
        label = html.escape(f"{self.title}. {self.alt}", quote=True)
        text = text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
        text = text.replace(INK, "currentColor")
        for number, colour in enumerate(PALETTE, start=1):
            text = text.replace(colour, f"var(--series-{number}, {colour})")
        return text


def new_axes(title: str, xlabel: str, ylabel: str):
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def number(value: float) -> str:
    return "no value" if pd.isna(value) else f"{value:.3g}"


def line_chart(
    name: str,
    title: str,
    xlabel: str,
    ylabel: str,
    series: dict[str, pd.DataFrame],  # columns mean, and low and high or nan; the index is x
    note: str = "",
) -> Chart:
    """A line a series, shaded between low and high."""
    figure, axes = new_axes(title, xlabel, ylabel)
    with mpl.rc_context(STYLE):
        for (label, data), marker in zip(series.items(), itertools.cycle(MARKERS), strict=False):
            every = max(len(data) // 8, 1)
            [line] = axes.plot(
                data.index, data["mean"], label=label, marker=marker, markevery=every, ms=4, lw=1.4
            )
            if data["low"].notna().any():
                axes.fill_between(
                    data.index, data["low"], data["high"], color=line.get_color(), alpha=0.18, lw=0
                )
        if all(isinstance(x, int | np.integer) for data in series.values() for x in data.index):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(series) > 1:
            figure.legend(loc="outside lower center", ncols=2)
    ends = "; ".join(
        f"{label} from {number(data['mean'].iloc[0])} to {number(data['mean'].iloc[-1])}"
        for label, data in series.items()
    )
    first = next(iter(series.values()))
    alt = f"Lines of {ylabel} against {xlabel}, from {first.index[0]} to {first.index[-1]}. {ends}."
    table = pd.DataFrame({label: data["mean"] for label, data in series.items()})
    return Chart(name, title, alt, table.rename_axis(xlabel), figure, note)


def bar_chart(
    name: str,
    title: str,
    xlabel: str,
    ylabel: str,
    mean: pd.DataFrame,  # index = places on the x axis, columns = series
    low: pd.DataFrame | None = None,
    high: pd.DataFrame | None = None,
    note: str = "",
    reference: float | None = None,
) -> Chart:
    """Points with intervals, grouped along x: they read better than bars where 0 means nothing."""
    figure, axes = new_axes(title, xlabel, ylabel)
    places = np.arange(len(mean))
    with mpl.rc_context(STYLE):
        if reference is not None:
            axes.axhline(reference, color=INK, lw=0.8, ls="--")
        width = 0.7 / max(len(mean.columns), 1)
        for i, (column, marker) in enumerate(
            zip(mean.columns, itertools.cycle(MARKERS), strict=False)
        ):
            offset = (i - (len(mean.columns) - 1) / 2) * width
            errors = None
            if low is not None and low[column].notna().any():
                errors = [mean[column] - low[column], high[column] - mean[column]]
            axes.errorbar(
                places + offset, mean[column], errors, label=column, fmt=marker, ms=5, capsize=2
            )
        axes.set_xticks(places, [str(x) for x in mean.index])
        if len(mean) > 5 or max(len(str(x)) for x in mean.index) > 10:
            axes.tick_params("x", rotation=35)
            for label in axes.get_xticklabels():
                label.set_horizontalalignment("right")
        axes.margins(x=0.08)
        if len(mean.columns) > 1:
            figure.legend(loc="outside lower center", ncols=2)
    parts = "; ".join(
        f"{column}: " + ", ".join(f"{x} {number(v)}" for x, v in mean[column].items())
        for column in mean.columns
    )
    alt = f"Points of {ylabel} by {xlabel}. {parts}."
    return Chart(name, title, alt, mean.rename_axis(xlabel), figure, note)


def heat_map(name: str, title: str, label: str, values: pd.DataFrame, note: str = "") -> Chart:
    """A square of numbers between -1 and 1, written in the cells."""
    figure, axes = new_axes(title, "tokens", "tokens")
    with mpl.rc_context(STYLE):
        axes.grid(False)
        image = axes.imshow(values, vmin=-1, vmax=1, cmap="RdBu_r", aspect="auto")
        axes.set_xticks(range(len(values.columns)), values.columns, rotation=35, ha="right")
        axes.set_yticks(range(len(values.index)), values.index)
        for i, row in enumerate(values.to_numpy()):
            for j, value in enumerate(row):
                if not np.isnan(value):
                    shade = "white" if abs(value) > 0.6 else "black"
                    axes.text(
                        j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade
                    )
        figure.colorbar(image, label=label)
    pairs = itertools.combinations(values.index, 2)
    parts = (f"{a} and {b} {number(values.loc[a, b])}" for a, b in pairs if b in values.columns)
    alt = f"Matrix of {label}. {'; '.join(parts)}."
    return Chart(name, title, alt, values, figure, note)


def plot_reward_curve(log_history: list[dict], path: Path | str, title: str = "") -> None:
    """Mean reward and share of correct completions of each rollout batch, as a PNG."""
    rows = [row for row in log_history if "reward" in row]
    batches = [row["rollout_batches"] for row in rows]
    panels = {"mean reward": "reward"}
    if any("kk/correct" in row for row in rows):
        panels["share of correct completions"] = "kk/correct"
    figure = Figure(figsize=(5 * len(panels), 3.5), layout="constrained")
    for axes, (label, key) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        axes.plot(batches, [row[key] for row in rows], marker=".", linewidth=1)
        axes.set(xlabel="rollout batch", ylabel=label)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
