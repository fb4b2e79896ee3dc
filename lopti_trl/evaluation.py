"""Accuracy on held-out puzzles, before, during and after training."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from trl.models.utils import unwrap_model_for_generation

from lopti_trl.tasks import kk

if TYPE_CHECKING:
    from datasets import Dataset


def generate_completions(
    model,
    tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float = 0.0,  # 0 = greedy
    batch_size: int = 64,
    seed: int = 0,
) -> list[str]:
    """One completion per prompt. Leaves the caller's random state and train mode as they were."""
    was_training = model.training
    model.eval()
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    completions = []
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        for start in tqdm(range(0, len(prompts), batch_size), desc="evaluate", leave=False):
            inputs = tokenizer(
                list(prompts[start : start + batch_size]),
                padding=True,
                padding_side="left",
                return_tensors="pt",
            ).to(model.device)
            ids = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                **sampling,
            )
            completions += tokenizer.batch_decode(
                ids[:, inputs["input_ids"].size(1) :], skip_special_tokens=True
            )
    model.train(was_training)
    return completions


def correct_by_size(
    model,
    tokenizer,
    puzzles: "Dataset",  # columns prompt (text), names, solution, num_people
    max_new_tokens: int,
    temperature: float = 0.0,  # 0 = greedy
    mode: str = "strict",
    **generation,
) -> list[tuple[int, bool]]:
    """(number of people, whether the completion earned the maximal reward) of each puzzle."""
    completions = generate_completions(
        model, tokenizer, puzzles["prompt"], max_new_tokens, temperature, **generation
    )
    return [
        (row["num_people"], kk.judge(completion, row["names"], row["solution"], mode).correct)
        for row, completion in zip(puzzles, completions, strict=True)
    ]


def accuracy_by_size(correct: Sequence[tuple[int, bool]]) -> dict[str, float]:
    """Keys "2", "3", ... and "average", the mean over puzzle sizes as in the paper's tables."""
    marks = defaultdict(list)
    for size, mark in correct:
        marks[size].append(mark)
    accuracy = {str(size): sum(marks[size]) / len(marks[size]) for size in sorted(marks)}
    return accuracy | {"average": sum(accuracy.values()) / len(accuracy)}


def evaluate_trainer(
    trainer, puzzles: "Dataset", mode: str = "strict"
) -> dict[str, dict[str, float]]:
    """Accuracy of the trainer's policy, greedy and with one sample at temperature 1.

    As the paper evaluates. Every process takes a share of the puzzles and gets the whole result.
    """
    args, accelerator = trainer.args, trainer.accelerator
    share = puzzles.shard(accelerator.num_processes, accelerator.process_index)
    results = {}
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped, accelerator, args.ds3_gather_for_generation
        ) as model,
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        for setting, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            correct = correct_by_size(
                model,
                trainer.processing_class,
                share,
                args.max_completion_length,
                temperature,
                mode,
                seed=args.seed + accelerator.process_index,
            )
            results[setting] = accuracy_by_size(gather_object(correct))
    return results
