"""Cost of the diagnostics: CPU time of a training step of a recipe with and without, in turn.

One process trains with both settings, alternating by rollout batch; medians over the batches:

    python scripts/bench_diagnostics.py --config kk_tiny_cpu.yaml --max_steps 40
"""

import copy
import statistics
import sys
import tempfile
import time

from transformers import TrainerCallback

from lopti_trl.train import build_trainer, load_datasets, load_tokenizer, parse_args


class Clock(TrainerCallback):
    """Processor seconds of each rollout batch, generation and update together."""

    def __init__(self, steps_per_batch: int):
        self.steps_per_batch = steps_per_batch
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.steps_per_batch == 0:
            self.start = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        if (state.global_step) % self.steps_per_batch == 0:
            self.seconds.append(time.process_time() - self.start)


def seconds_per_batch(options: list[str], diagnostics: bool) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        task, args, model = parse_args(
            [*options, "--output_dir", folder, "--diagnostics", str(diagnostics)]
        )
        tokenizer = load_tokenizer(model)
        train_set, _ = load_datasets(task, tokenizer)
        trainer = build_trainer(task, args, copy.copy(model), tokenizer, train_set)
        steps = trainer._steps_per_rollout // args.gradient_accumulation_steps
        clock = Clock(steps)
        trainer.add_callback(clock)
        trainer.train()
        return clock.seconds


def main() -> None:
    on, off = (seconds_per_batch(sys.argv[1:], diagnostics) for diagnostics in (True, False))
    # the same bits, hence the same work: pair the batches
    costs = [100 * (a - b) / b for a, b in zip(on, off, strict=True)]
    print(f"{len(costs)} rollout batches, {statistics.median(off):.2f} s each without diagnostics")
    total = 100 * sum(on) / sum(off) - 100
    print(f"cost: median {statistics.median(costs):.2f} %, total {total:.2f} %")


if __name__ == "__main__":
    main()
