"""Figures of a run."""

from pathlib import Path


def plot_reward_curve(log_history: list[dict], path: Path | str, title: str = "") -> None:
    """Mean reward and share of correct completions of each rollout batch, as a PNG."""
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

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
