"""Time the update against stock TRL's on the same recorded rollouts, side by side in one process.

Ratios of medians, with their spread over interleaved repetitions; machines are noisy, so absolute
times are not reported. Completion lengths are drawn like those of Knights and Knaves at a limit of
4096 (median about 15 % of the limit, long tail), and 30 % of the groups have equal rewards.

    python scripts/bench_update.py --quick
    python scripts/bench_update.py --json outputs/bench_update.json
"""

import argparse
import functools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from lopti_trl import LoptiGRPOConfig, LoptiGRPOTrainer
from lopti_trl.config import TRICKS
from lopti_trl.train import PACKAGE, TINY_MODEL

ON = {f"update_{name}": True for name in TRICKS}
OFF = {f"update_{name}": False for name in TRICKS}
CASES = {
    "stock": None,
    "grpo": ON,
    "ar": ON | {"ar_alpha": 0.3},
    "lopti": ON | {"lopti_eta": 0.5},
    "ar_lopti": ON | {"ar_alpha": 0.3, "lopti_eta": 0.5},
    "padding_free": ON | {"update_padding_free": True},
    **{f"only_{name}": OFF | {f"update_{name}": True} for name in TRICKS},
}
PROMPT_LENGTH = 64  # about as long as the drawn completions' limit is to K&K's prompts


def make_model(args: argparse.Namespace) -> Qwen2ForCausalLM:
    set_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocab_size,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def make_rollouts(args: argparse.Namespace, equal_lengths: bool) -> dict[str, torch.Tensor]:
    """A rollout batch as TRL's scoring returns it."""
    generator = torch.Generator().manual_seed(1)
    num_rows, limit = args.rows, args.max_completion_length
    lengths = (torch.randn(num_rows, generator=generator) * 0.8 + 0.0).exp() * 0.15 * limit
    lengths = lengths.long().clamp(8, limit)
    lengths[0] = limit  # stock pads to the longest: one completion at the limit
    prompt_lengths = torch.randint(
        PROMPT_LENGTH // 2, PROMPT_LENGTH, (num_rows,), generator=generator
    )
    advantages = torch.randn(num_rows // 8, 8, generator=generator)
    advantages -= advantages.mean(1, keepdim=True)
    if equal_lengths:
        lengths[:], prompt_lengths[:] = limit // 4, PROMPT_LENGTH
    else:
        equal = torch.rand(num_rows // 8, generator=generator).argsort()[
            : round(0.3 * num_rows / 8)
        ]
        advantages[equal] = 0.0
    width, prompt_width = int(lengths.max()), PROMPT_LENGTH
    completion_mask = (torch.arange(width) < lengths[:, None]).long()
    prompt_mask = (torch.arange(prompt_width) >= prompt_width - prompt_lengths[:, None]).long()
    ids = functools.partial(torch.randint, 2, args.vocab_size, generator=generator)
    # 19 % of tokens below .25 and 61 % above .75, as in the paper's Figure 1 (a)
    probs = torch.rand(num_rows, width, generator=generator) ** 0.35
    return {
        "prompt_ids": ids((num_rows, prompt_width)) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": ids((num_rows, width)) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": advantages.flatten(),
        "num_items_in_batch": completion_mask.sum(),
        "old_per_token_logps": probs.log() * completion_mask,
    }


def make_trainer(case: str, args: argparse.Namespace, folder: str):
    fields = CASES[case]
    trainer_class, config_class = LoptiGRPOTrainer, LoptiGRPOConfig
    if fields is None:
        trainer_class, config_class, fields = GRPOTrainer, GRPOConfig, {}
    else:
        fields = fields | {"diagnostics": False}  # they look at the rollout being made
    config = config_class(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        report_to="none",
        activation_checkpointing=False,
        num_generations=8,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.rows // args.batch_size,
        steps_per_generation=args.rows // args.batch_size,
        max_completion_length=args.max_completion_length,
        num_iterations=2,  # keeps stock from reusing the first forward pass as pi_old
        loss_type="dapo",
        learning_rate=0.0,
        disable_tqdm=True,
        **fields,
    )
    trainer = trainer_class(
        make_model(args),
        lambda completions, **kwargs: [0.0] * len(completions),
        config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * args.rows}),
        processing_class=AutoTokenizer.from_pretrained(PACKAGE / "assets" / TINY_MODEL),
    )
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    trainer.model.train()
    return trainer


def update(trainer, rollouts: dict) -> list[torch.Tensor]:
    """One sweep over the rollout batch (two under Lopti). Returns the gradient of each phase."""
    trainer._step, trainer._buffered_inputs = 0, None
    args = trainer.args
    original = GRPOTrainer._generate_and_score_completions
    GRPOTrainer._generate_and_score_completions = lambda self, inputs: rollouts
    torch.manual_seed(0)  # TRL shuffles the rows
    gradients = []
    try:
        for _ in range(2 if getattr(args, "lopti_eta", None) else 1):
            for _ in range(args.gradient_accumulation_steps):
                trainer.training_step(trainer.model, None, None)
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
            trainer.model.zero_grad()
    finally:
        GRPOTrainer._generate_and_score_completions = original
    return gradients


def time_cases(cases: list[str], args: argparse.Namespace, equal_lengths: bool = False) -> dict:
    """Per case: ratio to stock of each repetition, gradient error, and what the update skipped."""
    rollouts = make_rollouts(args, equal_lengths)
    results = {case: {"ratios": []} for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {case: make_trainer(case, args, folder) for case in ("stock", *cases)}
        # the CPU's fast attention kernel rounds more: by itself it moves stock's gradient by 1.1e-6
        exactly = functools.partial(sdpa_kernel, SDPBackend.MATH)
        with exactly():
            reference = update(trainers["stock"], rollouts)[0]
        for case in cases:  # also the warm-up
            with exactly():
                gradient = sum(update(trainers[case], rollouts))
            if "ar" not in case.split("_"):  # AR changes the gradient by design
                error = (gradient - reference).norm() / reference.norm()
                results[case]["gradient_error"] = error.item()
            metrics = trainers[case]._metrics["train"]
            for name in ("padding_fraction", "rows_skipped", "tokens_projected"):
                if values := metrics.get(f"update/{name}"):
                    results[case][name] = statistics.mean(values)
        for _ in range(args.repetitions):
            seconds = {}
            for case, trainer in trainers.items():
                start = time.perf_counter()
                update(trainer, rollouts)
                seconds[case] = time.perf_counter() - start
            for case in cases:
                results[case]["ratios"].append(seconds[case] / seconds["stock"])
    for result in results.values():
        result["ratio"] = statistics.median(result["ratios"])
    return results


def high_water_mark() -> int:
    """Peak resident memory of this process in KiB, or of its GPU in bytes.

    Not `ru_maxrss`: that of a child begins with what its parent held at the fork.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def peak_memory(case: str, args: argparse.Namespace) -> None:
    """Print the peak of a process that makes one update: before it, and all of it."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, rollouts = make_trainer(case, args, folder), make_rollouts(args, False)
        before = high_water_mark()
        update(trainer, rollouts)
    print(before, high_water_mark())


def memory_ratios(argv: list[str]) -> tuple[float, float]:
    """Peak memory of both Lopti phases over stock's single update: all of the process (libraries,
    model, gradients, update), and what the update adds to it."""
    command = [sys.executable, __file__, *argv, "--memory_of"]
    outputs = [subprocess.check_output([*command, case]) for case in ("lopti", "stock")]
    # after what libraries print
    ours, stock = ([int(number) for number in output.split()[-2:]] for output in outputs)
    return ours[1] / stock[1], (ours[1] - ours[0]) / (stock[1] - stock[0])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--rows", type=int, default=32, help="completions a rollout batch")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_completion_length", type=int, default=512)
    parser.add_argument("--vocab_size", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--memory_of", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.repetitions, args.max_completion_length, args.width, args.rows = 1, 96, 128, 16
    if args.memory_of:
        peak_memory(args.memory_of, args)
        return

    main_cases = ["grpo", "ar", "lopti", "ar_lopti", "padding_free"]
    tricks = [] if args.quick else [f"only_{name}" for name in TRICKS]
    results = time_cases(main_cases + tricks, args)
    level = time_cases(["grpo", "lopti"], args, equal_lengths=True)
    parameters = make_model(args).num_parameters()
    whole_memory, update_memory = memory_ratios(argv)
    summary = {
        "ratio": {case: results[case]["ratio"] for case in main_cases},
        "ratio_range": {case: [min(r["ratios"]), max(r["ratios"])] for case, r in results.items()},
        "ratio_by_trick": {name: results[f"only_{name}"]["ratio"] for name in TRICKS if tricks},
        "ratio_with_nothing_to_gain": {case: level[case]["ratio"] for case in level},
        "memory_ratio": whole_memory,
        "memory_ratio_of_update": update_memory,
        "useful_tokens": 1 - results["padding_free"]["padding_fraction"],
        "useful_tokens_padded": 1 - results["grpo"]["padding_fraction"],
        "max_gradient_error": max(r.get("gradient_error", 0.0) for r in results.values()),
        "settings": vars(args) | {"parameters": parameters, "threads": torch.get_num_threads()},
    }
    table = Table(
        title=f"Update time, as a ratio to stock GRPO's ({parameters / 1e6:.1f} M params)"
    )
    for column in ("case", "median", "range", "gradient error", "padding", "rows skipped"):
        table.add_column(column)
    for case, result in results.items():
        ratios = result["ratios"]
        shown = [result.get(k) for k in ("gradient_error", "padding_fraction", "rows_skipped")]
        table.add_row(
            case,
            f"{result['ratio']:.3f}",
            f"{min(ratios):.3f} - {max(ratios):.3f}",
            *("" if value is None else f"{value:.2g}" for value in shown),
        )
    console = Console()
    console.print(table)
    console.print(f"nothing to gain: {summary['ratio_with_nothing_to_gain']}")
    console.print(
        f"peak memory of both Lopti phases: {whole_memory:.2f} x stock's process, "
        f"{update_memory:.2f} x what its update adds"
    )
    console.print(
        f"useful tokens: {summary['useful_tokens']:.3f} padding-free, "
        f"{summary['useful_tokens_padded']:.3f} in padded micro-batches"
    )
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
