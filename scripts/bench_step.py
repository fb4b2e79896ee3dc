"""Time whole steps, generation included, against stock TRL's: GRPO, AR, Lopti and both.

Every method generates and trains on the same completions of a random model, in turn in one process;
reported are medians of ratios to stock GRPO. Completions end at random, so that their
lengths have a long tail (median about 14 % of the limit). `--chart` draws the ratio as completion
length and rollout batch grow.

    python scripts/bench_step.py --chart outputs/bench_step.png --json outputs/bench_step.json
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from bench_update import ON, make_model
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from lopti_trl import LoptiGRPOConfig, LoptiGRPOTrainer
from lopti_trl.train import PACKAGE, TINY_MODEL

CASES = {
    "stock": None,
    "GRPO": ON | {"generation_skip_finished": True},
    "AR": {"ar_alpha": 0.3},
    # a random model's tokens are all rare: a quantile splits them as eta does a real model's
    "Lopti": {"lopti_quantile": 0.4},
    "AR + Lopti": {"ar_alpha": 0.3, "lopti_quantile": 0.4},
}
PROMPT = "Knights always tell the truth, and knaves always lie. You meet 2 inhabitants."


def make_trainer(case: str, length: int, rows: int, args: argparse.Namespace, folder: str):
    fields = CASES[case]
    trainer_class, config_class = LoptiGRPOTrainer, LoptiGRPOConfig
    if fields is None:
        trainer_class, config_class, fields = GRPOTrainer, GRPOConfig, {}
    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "assets" / TINY_MODEL)
    # an untrained model gives every token about 1 / vocab_size: end after 20 % of the limit
    bias = math.log(args.vocab_size / (0.2 * length))
    config = config_class(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        activation_checkpointing=False,
        num_generations=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=rows // 8,
        steps_per_generation=rows // 4,  # two optimizer steps a rollout batch, as the paper's
        max_completion_length=length,
        generation_kwargs={"sequence_bias": [[[tokenizer.eos_token_id], bias]]},
        loss_type="dapo",
        learning_rate=0.0,
        max_steps=4 if "lopti_quantile" in fields else 2,
        **fields,
    )
    model = make_model(args)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    trainer = trainer_class(
        model,
        lambda completion_ids, **kwargs: [float(ids[0] % 2) for ids in completion_ids],
        config,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * rows}),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def ratios(length: int, rows: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Per method, the time of a rollout batch with its update over stock's, by repetition."""
    results = {case: [] for case in CASES if case != "stock"}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {case: make_trainer(case, length, rows, args, folder) for case in CASES}
        for repetition in range(args.repetitions + 1):
            seconds = {}
            for case, trainer in trainers.items():
                trainer._step, trainer._buffered_inputs = 0, None
                set_seed(repetition)  # lr 0: every method gets the same completions
                start = time.perf_counter()
                trainer.train()
                seconds[case] = time.perf_counter() - start
            for case, values in results.items():
                if repetition:  # the first one warms up
                    values.append(seconds[case] / seconds["stock"])
    return results


def draw(sweeps: dict[str, dict[int, dict[str, list[float]]]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(sweeps), figsize=(9, 3.5), sharey=True, layout="tight")
    for axis, (name, points) in zip(axes, sweeps.items(), strict=True):
        for case in next(iter(points.values())):
            medians = [statistics.median(point[case]) for point in points.values()]
            axis.plot(list(points), medians, marker="o", label=case)
        axis.axhline(1, color="grey", linestyle=":")
        axis.set(xlabel=name, xscale="log", ylim=(0, None))
        axis.set_xticks(list(points), [str(x) for x in points], minor=False)
        axis.minorticks_off()
    axes[0].set_ylabel("time of a step / stock GRPO's")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max_completion_length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="completions a rollout batch")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--vocab_size", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--chart", type=Path, help="draw them to this file")
    args = parser.parse_args()

    length, rows = args.max_completion_length, args.rows
    settings = {(length * f, rows) for f in args.factors} | {
        (length, rows * f) for f in args.factors
    }
    measured = {setting: ratios(*setting, args) for setting in tqdm(sorted(settings))}
    sweeps = {
        "longest completion (tokens)": {
            length * f: measured[length * f, rows] for f in args.factors
        },
        "completions a rollout batch": {rows * f: measured[length, rows * f] for f in args.factors},
    }
    table = Table(title="Time of a step, generation included, as a ratio to stock GRPO's")
    for column in ("longest", "completions", *(case for case in CASES if case != "stock")):
        table.add_column(column)
    for (longest, completions), results in measured.items():
        cells = [
            f"{statistics.median(v):.2f} ({min(v):.2f} - {max(v):.2f})" for v in results.values()
        ]
        table.add_row(str(longest), str(completions), *cells)
    Console().print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"sweeps": sweeps, "settings": vars(args)}, default=str))
    if args.chart:
        draw(sweeps, args.chart)


if __name__ == "__main__":
    main()
