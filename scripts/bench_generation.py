"""Time transformers' generation of a rollout batch as TRL runs it, with finished completions left
out, and with transformers' continuous batching, in turn in one process; medians of ratios.

    python scripts/bench_generation.py --continuous_batching
"""

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from lopti_trl.engines import Sampling
from lopti_trl.generation import finished_rows_leave
from lopti_trl.tasks.kk import load_puzzles
from lopti_trl.train import model_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="kk-tiny", help="a folder or a model on the hub")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8, help="of each prompt")
    parser.add_argument("--max_completion_length", type=int, default=320)
    parser.add_argument("--num_people", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--continuous_batching", action="store_true", help="slow on a CPU")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = model_path(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    puzzles = load_puzzles(
        "generated",
        "train",
        num_people=args.num_people,
        num_puzzles=args.prompts,
        seed=0,
        tokenizer=tokenizer,
    )
    prompts = [p for p in puzzles["prompt"][: args.prompts] for _ in range(args.completions)]
    encoded = tokenizer(prompts)["input_ids"]
    inputs = tokenizer.pad({"input_ids": encoded}, return_tensors="pt").to(device)
    config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        disable_compile=True,
        **Sampling(args.max_completion_length, temperature=1.0).transformers_kwargs(),
    )

    def stock() -> torch.Tensor:
        return model.generate(**inputs, generation_config=config)

    def without_finished() -> torch.Tensor:
        with finished_rows_leave(model, config):
            return stock()

    def continuous() -> None:
        model.generate_batch(
            encoded,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(),
            progress_bar=False,
        )

    cases = {"stock": stock, "finished left out": without_finished}
    if args.continuous_batching:
        cases["continuous batching"] = continuous
    ratios, lengths, same = {name: [] for name in cases}, [], 0
    with torch.no_grad():
        for repetition in range(args.repetitions + 1):
            seconds, results = {}, {}
            for name, case in cases.items():
                torch.manual_seed(repetition)
                start = time.perf_counter()
                results[name] = case()
                seconds[name] = time.perf_counter() - start
            if repetition:  # the first one warms up
                ids = results["stock"]
                same += torch.equal(ids, results["finished left out"])
                completions = ids[:, inputs["input_ids"].size(1) :]
                lengths += (completions != tokenizer.pad_token_id).sum(1).tolist()
                for name, values in ratios.items():
                    values.append(seconds[name] / seconds["stock"])
    table = Table(title="Time of generation, as a ratio to transformers' as TRL calls it")
    for column in ("case", "median", "range"):
        table.add_column(column)
    for name, values in ratios.items():
        median = statistics.median(values)
        table.add_row(name, f"{median:.2f}", f"{min(values):.2f} - {max(values):.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"completions: {len(prompts)}, mean length {statistics.mean(lengths):.0f} of at most "
        f"{args.max_completion_length} tokens; equal to stock's in {same} of {args.repetitions} "
        "repetitions"
    )


if __name__ == "__main__":
    main()
