"""Compare GRPO, AR, Lopti and both on the laptop recipe: equal data, several seeds.

GRPO with num_iterations=2 takes as many optimizer steps as Lopti: the equal-step control. Finished
runs are kept, so that a comparison cut short goes on where it stopped:

    python scripts/compare_methods.py --seeds 1 2 3 --jobs 2
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
OFF = ["--ar_alpha", "0", "--lopti_eta", "none"]
METHODS = {
    "GRPO": OFF,
    "GRPO, num_iterations 2": [*OFF, "--num_iterations", "2"],
    "AR": ["--ar_alpha", "0.3", "--lopti_eta", "none"],
    "Lopti": ["--ar_alpha", "0", "--lopti_eta", "0.5"],
    "AR + Lopti": ["--ar_alpha", "0.3", "--lopti_eta", "0.5"],
}


def run(method: str, seed: int, args: argparse.Namespace) -> dict:
    """metrics.json of one run, trained unless it is there."""
    name = "".join(c if c.isalnum() else "_" for c in method.lower())
    folder = Path(args.output) / f"{name}-{seed}"
    metrics = folder / "metrics.json"
    if not metrics.exists() or "after" not in json.loads(metrics.read_text())["evaluation"]:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", args.config]
        options = ["--seed", str(seed), "--output_dir", str(folder), *METHODS[method]]
        with (folder / "output.txt").open("w") as output:
            subprocess.run(
                [*command, *options, *args.options], stdout=output, stderr=output, check=True
            )
    return json.loads(metrics.read_text())


def mean_and_spread(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


def table(results: dict[str, list[dict]]) -> str:
    """Markdown: held-out accuracy by number of people, mean and standard deviation over seeds."""
    evaluation = next(iter(results.values()))[0]["evaluation"]["after"]
    columns = [
        (setting, size) for setting in evaluation for size in evaluation[setting] if size.isdigit()
    ]
    titles = ["method", "steps", *(f"{setting}, {size} people" for setting, size in columns)]
    everyone = [run for runs in results.values() for run in runs]
    rows = [["before", "0", *accuracies(everyone, "before", columns)]]
    for method, runs in results.items():
        steps = runs[0]["plan"]["optimizer_steps"]
        rows.append([method, str(steps), *accuracies(runs, "after", columns)])
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracies(runs: list[dict], moment: str, columns: list[tuple[str, str]]) -> list[str]:
    return [
        mean_and_spread([run["evaluation"][moment][setting][size] for run in runs])
        for setting, size in columns
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="kk_tiny_cpu.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--output", default="outputs/compare_methods")
    parser.add_argument("options", nargs="*", help="options for every run, after --")
    args = parser.parse_args()

    cases = [(method, seed) for seed in args.seeds for method in METHODS]
    with ThreadPoolExecutor(args.jobs) as pool:
        metrics = list(tqdm(pool.map(lambda case: run(*case, args), cases), total=len(cases)))
    results = {method: [] for method in METHODS}
    for (method, _), result in zip(cases, metrics, strict=True):
        results[method].append(result)
    text = table(results)
    (Path(args.output) / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
