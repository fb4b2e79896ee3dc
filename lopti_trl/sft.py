"""`sft`: supervised fine-tuning by TRL, on the puzzles and with the evaluation of `train`."""

import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from rich.console import Console
from transformers import AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from lopti_trl.engines import Sampling, TransformersEngine, random_state_kept
from lopti_trl.evaluation import accuracy, evaluate
from lopti_trl.tasks.kk_solutions import solve_quiz
from lopti_trl.train import (
    VERSIONED,
    MetricsCallback,
    TaskArguments,
    evaluation_table,
    load_datasets,
    load_held_out,
    load_tokenizer,
    model_init_kwargs,
    resume_folder,
)


@dataclass
class SFTArguments(SFTConfig):
    """`trl.SFTConfig` with what evaluation by generation needs."""

    max_completion_length: int = field(
        default=1024, metadata={"help": "Most tokens of an evaluated completion."}
    )
    ds3_gather_for_generation: bool = field(
        default=True, metadata={"help": "Gather a ZeRO-3 model's weights to generate, as in GRPO."}
    )


def solution_texts(puzzles: Dataset, seed: int) -> Dataset:
    """Columns prompt and completion: the rendered puzzle and a worked solution.

    Raises ValueError for puzzles without their text, which the solution is made from.
    """
    if "quiz" not in puzzles.column_names:
        raise ValueError(
            f"The data set has the columns {', '.join(puzzles.column_names)}, but solutions are "
            "made from a quiz column, the puzzle's text. Add it, or use dataset: generated."
        )
    return Dataset.from_list(
        [{"prompt": row["prompt"], "completion": solve_quiz(row["quiz"], seed)} for row in puzzles]
    )


def main(task: TaskArguments, args: SFTArguments, model: ModelConfig) -> dict:
    """Fine-tune, evaluate before and after; metrics.json has the form that `train` writes."""
    console = Console(quiet=args.process_index != 0)
    tokenizer: AutoTokenizer = load_tokenizer(model, args.trust_remote_code)
    train_set, test_set = load_datasets(task, tokenizer)
    args.model_init_kwargs = model_init_kwargs(model, args)
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=args,
        train_dataset=solution_texts(train_set, args.seed),
        processing_class=tokenizer,
        callbacks=[MetricsCallback(output / "metrics.jsonl")],
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    tasks = load_held_out(task, test_set, tokenizer)
    sampling = Sampling(args.max_completion_length, task.eval_temperature)
    accelerator, wrapped = trainer.accelerator, trainer.model

    def measure(moment: str) -> dict[str, dict[str, float]]:
        with (
            random_state_kept(),
            unwrap_model_for_generation(
                wrapped, accelerator, args.ds3_gather_for_generation
            ) as network,
            DistributedBackend(accelerator).summon_full_params(wrapped, recurse=False),
        ):
            engine = TransformersEngine(network, tokenizer)
            found = evaluate(
                engine, tokenizer, tasks, task.eval_metrics, sampling, args.seed, label=moment
            )
        return accuracy(found["scores"])

    evaluation = {"before": measure("before")} if tasks else {}
    trainer.train(resume_from_checkpoint=resume_folder(args))
    trainer.save_model(args.output_dir)
    if tasks:
        wrapped = trainer.model_wrapped
        evaluation["after"] = measure("after")
        console.print(evaluation_table(evaluation))
    results = {
        "plan": {"method": "SFT", "optimizer_steps": trainer.state.max_steps},
        "evaluation": evaluation,
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
        "log": trainer.state.log_history,
    }
    if trainer.is_world_process_zero():
        (output / "metrics.json").write_text(json.dumps(results, indent=2))
    console.print(f"Model and metrics.json are in {output}.")
    trainer.accelerator.end_training()
    return results
