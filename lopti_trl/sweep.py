"""`sweep`: methods x seeds x values from one YAML, in order or several at a time, and their table.

config: kk_tiny_cpu.yaml        # of every run
output_dir: outputs/sweep
seeds: [1, 2, 3]
jobs: 2                         # runs at a time; default 1
baseline: GRPO                  # of the paired tests; default: the first method
options: {num_train_epochs: 1}  # of every run
methods:
  GRPO: {ar_alpha: 0, lopti_eta: none}
  AR: {ar_alpha: {each: [0.1, 0.3]}, lopti_eta: none}   # a method for each value
"""

import argparse
import fcntl
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml
from tqdm.auto import tqdm

from lopti_trl.compare import markdown, summarise

Options = dict[str, object]
KEYS = ("config", "output_dir", "seeds", "methods", "jobs", "baseline", "options")


@dataclass(frozen=True)
class Sweep:
    """What a YAML asks for, its values expanded."""

    config: str
    output_dir: Path
    seeds: list[int]
    methods: dict[str, Options]  # by name, in order
    jobs: int = 1
    baseline: str = ""

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Method and seed of every run: a seed's methods first, so that comparisons come early."""
        return [(method, seed) for seed in self.seeds for method in self.methods]

    def folder(self, method: str, seed: int) -> Path:
        name = "".join(c if c.isalnum() or c in ".-" else "_" for c in method)
        return self.output_dir / f"{name}-{seed}"


def expand(name: str, options: Options) -> dict[str, Options]:
    """A method for every combination of its `each` values, named after them."""
    lists = {k: v["each"] for k, v in options.items() if isinstance(v, dict)}
    return {
        ", ".join([name, *(f"{k} {v}" for k, v in zip(lists, values, strict=True))]): {
            **options,
            **dict(zip(lists, values, strict=True)),
        }
        for values in itertools.product(*lists.values())
    }


def load_sweep(path: Path | str) -> Sweep:
    """Raises ValueError for what is missing, unknown or of the wrong kind, with the fix."""
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    for key in ("config", "output_dir", "seeds", "methods"):
        if not content.get(key):
            raise ValueError(
                f"{path} has no {key}. A sweep needs config, output_dir, seeds, methods."
            )
    if unknown := [key for key in content if key not in KEYS]:
        raise ValueError(f"{path} has an unknown key {unknown[0]!r}. Use {', '.join(KEYS)}.")
    methods = {}
    for name, options in content["methods"].items():
        for option, value in (options or {}).items():
            if isinstance(value, dict) and not isinstance(value.get("each"), list):
                raise ValueError(
                    f"{path}: {name}.{option}={value} is no value. Write one, or "
                    "`{each: [a, b]}` for a method each."
                )
        for method, values in expand(name, options or {}).items():
            methods[method] = {**(content.get("options") or {}), **values}
    baseline = content.get("baseline", next(iter(methods)))
    if baseline not in methods:
        raise ValueError(f"{path}: baseline={baseline!r} is no method. Use one of {list(methods)}.")
    sweep = Sweep(
        str(content["config"]),
        Path(content["output_dir"]),
        list(content["seeds"]),
        methods,
        int(content.get("jobs", 1)),
        baseline,
    )
    if len({sweep.folder(*run) for run in sweep.runs}) < len(sweep.runs):
        raise ValueError(
            f"{path}: two runs have the same folder. Give methods and seeds other names."
        )
    return sweep


def is_finished(folder: Path) -> bool:
    """Trained to the end, and evaluated if it was before."""
    try:
        metrics = json.loads((folder / "metrics.json").read_text())
    except (FileNotFoundError, ValueError):
        return False
    return "log" in metrics and ("after" in metrics["evaluation"] or not metrics["evaluation"])


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a folder's lock; a process that inherits the file keeps it, if we are killed too."""
    with (folder / "sweep.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # an orphan of a killed sweep ends its run first
        yield file.fileno()


def words(options: Options) -> list[str]:
    """Command-line words of options; None is `none`, a list several words."""
    result = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        result += [f"--{name}", *("none" if v is None else str(v) for v in values)]
    return result


def run(sweep: Sweep, method: str, seed: int) -> Path:
    """The folder of a finished run, trained now unless it is there.

    Raises ValueError if it was made with other options, RuntimeError if training fails.
    """
    folder = sweep.folder(method, seed)
    folder.mkdir(parents=True, exist_ok=True)
    options = {"config": sweep.config, **sweep.methods[method], "seed": seed}
    with locked(folder) as lock:
        record = folder / "sweep.json"
        wanted = json.dumps({"method": method, "seed": seed, "options": options}, indent=1)
        if record.exists() and record.read_text() != wanted:
            raise ValueError(
                f"{folder} is of a run with other options (see {record.name}). Restore them in the "
                "YAML, give the method another name, or move the folder away."
            )
        if is_finished(folder):
            return folder
        partial = folder / "sweep.json.partial"
        partial.write_text(wanted)
        partial.rename(record)  # a kill leaves no half of it
        command = [sys.executable, "-m", "lopti_trl.cli", "train", *words(options)]
        command += ["--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
        with (folder / "output.txt").open("w") as output:
            status = subprocess.run(
                command, stdout=output, stderr=output, pass_fds=[lock], env=os.environ
            ).returncode
    if status:
        last = (folder / "output.txt").read_text().strip().splitlines()[-1:]
        raise RuntimeError(
            f"{method}, seed {seed}, ended with status {status}: {''.join(last)} Its output is in "
            f"{folder / 'output.txt'}; the sweep goes on from there when started again."
        )
    return folder


def results(sweep: Sweep) -> pd.DataFrame:
    """One row a finished run and metric: method, seed, metric, value."""
    rows = []
    for method, seed in sweep.runs:
        folder = sweep.folder(method, seed)
        if not is_finished(folder):
            continue
        metrics = json.loads((folder / "metrics.json").read_text())
        values = {
            f"{setting} {moment}": accuracy["average"]
            for moment, settings in metrics["evaluation"].items()
            for setting, accuracy in settings.items()
        }
        rewards = [row["reward"] for row in metrics["log"] if "reward" in row]
        last = rewards[-max(len(rewards) // 10, 1) :]
        values["reward, last tenth"] = sum(last) / len(last)
        rows += [(method, seed, metric, value) for metric, value in values.items()]
    return pd.DataFrame(rows, columns=["method", "seed", "metric", "value"])


def write_tables(sweep: Sweep) -> Path:
    """runs.parquet and, over seeds, results.parquet and results.md in the sweep's folder."""
    table = results(sweep)
    summary = summarise(table, sweep.baseline)
    table.to_parquet(sweep.output_dir / "runs.parquet")
    summary.to_parquet(sweep.output_dir / "results.parquet")
    (sweep.output_dir / "results.md").write_text(markdown(summary), encoding="utf-8")
    return sweep.output_dir / "results.parquet"


def main(args: list[str]) -> str:
    """Do what is left of a sweep; a failed run does not stop the others."""
    parser = argparse.ArgumentParser(
        prog="lopti-trl sweep",
        description="Methods x seeds x values from one YAML. Finished runs are kept: started "
        "again, it goes on where it stopped.",
    )
    parser.add_argument("file", help="the YAML; its form is at the top of lopti_trl/sweep.py")
    parser.add_argument("--jobs", type=int, help="runs at a time, in place of the YAML's")
    known = parser.parse_args(args)
    sweep = load_sweep(known.file)
    failures = []

    def attempt(case: tuple[str, int]) -> None:
        try:
            run(sweep, *case)
        except (RuntimeError, ValueError) as error:
            failures.append(str(error))

    with ThreadPoolExecutor(known.jobs or sweep.jobs) as pool:
        list(tqdm(pool.map(attempt, sweep.runs), total=len(sweep.runs), desc="sweep"))
    path = write_tables(sweep)
    if failures:
        raise SystemExit("\n".join(failures))
    return f"{len(sweep.runs)} runs are done. The table is {path}."
