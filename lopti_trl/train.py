"""`train`: one YAML, a plan, a training run with evaluation before and after, its results."""

import functools
import importlib.metadata
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, ProgressCallback, TrainerCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from lopti_trl.checkpoint import find_last_checkpoint
from lopti_trl.config import LoptiGRPOConfig
from lopti_trl.evaluation import evaluate_trainer
from lopti_trl.report import plot_reward_curve
from lopti_trl.tasks import kk
from lopti_trl.trainer import LoptiGRPOTrainer

if TYPE_CHECKING:
    from datasets import Dataset

PACKAGE = Path(__file__).parent
CONFIGS = PACKAGE.parent / "configs"
TINY_MODEL = "kk-tiny"  # ships with the package
VERSIONED = ("lopti-trl", "torch", "trl", "transformers", "accelerate")


@dataclass
class TaskArguments:
    """What to train on and how answers are judged."""

    task: Literal["kk"] = field(default="kk", metadata={"help": "kk: Knights-and-Knaves puzzles."})
    dataset: str = field(
        default="generated",
        metadata={
            "help": "generated, a .parquet, .jsonl or .json file (the official K&K files too), or "
            "a data set on the hub."
        },
    )
    eval_dataset: str = field(
        default="generated", metadata={"help": "Held-out puzzles, given as `dataset` is."}
    )
    num_people: list[int] = field(
        default_factory=lambda: [3, 4, 5, 6, 7], metadata={"help": "Puzzle sizes, in 2..8."}
    )
    train_puzzles: int = field(default=900, metadata={"help": "Training puzzles of each size."})
    test_puzzles: int = field(
        default=100, metadata={"help": "Held-out puzzles of each size; 0 turns evaluation off."}
    )
    dataset_seed: int = field(default=0, metadata={"help": "Seed of the generated puzzles."})
    reward_mode: Literal["strict", "lenient"] = field(
        default="strict",
        metadata={"help": "strict: the official rule. lenient: what a person would accept."},
    )


def find_config(name: str) -> Path:
    """A path as given, or a bare name from configs/. FileNotFoundError lists what is there."""
    path = Path(name)
    candidates = [path, CONFIGS / path] if path.name == name else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    recipes = ", ".join(sorted(p.name for p in CONFIGS.glob("*.yaml")))
    raise FileNotFoundError(f"No config {name}. Give a path, or one of {CONFIGS}: {recipes}.")


def make_parser() -> TrlParser:
    """TRL's parser over our arguments, in which every optional option can be set to `none`."""
    parser = TrlParser((TaskArguments, LoptiGRPOConfig, ModelConfig), prog="train")
    for action in parser._actions:
        # argparse cannot say None, without which a YAML's lopti_eta could not be turned off
        if action.type in (int, float) and action.default is None:
            action.type = functools.partial(_none_or, action.type)
    return parser


def _none_or(kind: type, text: str):
    return None if text.lower() in ("none", "null") else kind(text)


def parse_args(args: list[str]) -> tuple[TaskArguments, LoptiGRPOConfig, ModelConfig]:
    """Command line beats YAML beats defaults; unknown keys raise."""
    args = list(args)
    if "--config" in args:
        position = args.index("--config") + 1
        if position == len(args):
            raise ValueError("--config needs the name of a YAML file after it.")
        args[position] = str(find_config(args[position]))
    return make_parser().parse_args_and_config(args)


def model_path(name: str) -> str:
    """A model's name, or the folder of the one that ships with the package."""
    return str(PACKAGE / "assets" / TINY_MODEL) if name == TINY_MODEL else name


def load_tokenizer(model: ModelConfig, trust_remote_code: bool = False):
    if model.model_name_or_path is None:
        raise ValueError(
            f"model_name_or_path is not set. Give a model on the hub, a folder, or {TINY_MODEL}."
        )
    model.model_name_or_path = model_path(model.model_name_or_path)
    return AutoTokenizer.from_pretrained(
        model.model_name_or_path,
        revision=model.model_revision,
        trust_remote_code=trust_remote_code,
        padding_side="left",
        truncation_side="left",
    )


def load_datasets(task: TaskArguments, tokenizer) -> tuple["Dataset", "Dataset | None"]:
    """Training and held-out puzzles, prompts rendered."""
    load = functools.partial(
        kk.load_puzzles, num_people=task.num_people, seed=task.dataset_seed, tokenizer=tokenizer
    )
    train = load(task.dataset, "train", num_puzzles=task.train_puzzles)
    if not task.test_puzzles:
        return train, None
    return train, load(task.eval_dataset, "test", num_puzzles=task.test_puzzles)


@dataclass(frozen=True)
class Plan:
    """What a run will do, from its config alone."""

    method: str
    prompts_per_rollout_batch: int
    completions_per_rollout_batch: int
    rollout_batches: float
    optimizer_steps_per_rollout_batch: float
    optimizer_steps: int
    max_tokens_per_micro_batch: int  # prompt and completion, per process

    @classmethod
    def of(cls, args: LoptiGRPOConfig, prompt_lengths: list[int]) -> "Plan":
        """Raises ValueError if the data set does not fill one rollout batch."""
        prompts = args.generation_batch_size // args.num_generations
        if len(prompt_lengths) < prompts:
            raise ValueError(
                f"The data set has {len(prompt_lengths)} prompts, but one rollout batch takes "
                f"{prompts} (generation_batch_size={args.generation_batch_size} / num_generations="
                f"{args.num_generations}). Add prompts or shrink the rollout batch."
            )
        passes = args.num_iterations * (2 if args.uses_lopti else 1)
        steps = passes * args.steps_per_generation / args.gradient_accumulation_steps
        batches = args.num_train_epochs * (len(prompt_lengths) // prompts)
        if args.max_steps > 0:
            batches = args.max_steps / steps
        return cls(
            method=method_name(args),
            prompts_per_rollout_batch=prompts,
            completions_per_rollout_batch=args.generation_batch_size,
            rollout_batches=batches,
            optimizer_steps_per_rollout_batch=steps,
            optimizer_steps=round(batches * steps),
            max_tokens_per_micro_batch=args.per_device_train_batch_size
            * (max(prompt_lengths) + args.max_completion_length),
        )

    def table(self) -> Table:
        table = Table(title="Plan", show_header=False)
        for name, value in asdict(self).items():
            shown = value if isinstance(value, str) else f"{value:,g}"
            table.add_row(name.replace("_", " "), shown)
        return table


def method_name(args: LoptiGRPOConfig) -> str:
    parts = ["GRPO"]
    if args.uses_ar:
        parts.append(f"AR (alpha {args.ar_alpha})")
    if args.lopti_eta is not None:
        parts.append(f"Lopti (eta {args.lopti_eta}, {args.lopti_order}, {args.lopti_schedule})")
    if args.lopti_quantile is not None:
        parts.append(
            f"Lopti (quantile {args.lopti_quantile}, {args.lopti_order}, {args.lopti_schedule})"
        )
    if args.prob_band is not None:
        parts.append(f"band {args.prob_band}")
    return " + ".join(parts)


class ConsoleCallback(ProgressCallback):
    """Trainer's progress bar with one short line a log, in place of TRL's thirty metrics."""

    SHOWN = (
        ("rollout_batches", "rollout batch"),
        ("reward", "reward"),
        ("kk/correct", "correct"),
        ("completions/mean_length", "tokens"),
        ("grad_norm", "grad norm"),
    )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs and "reward" in logs:
            shown = [f"{label} {logs[key]:.4g}" for key, label in self.SHOWN if key in logs]
            self.training_bar.write("  ".join(shown))


class MetricsCallback(TrainerCallback):
    """Appends every log to metrics.jsonl at once: a run cut short keeps what it measured."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:  # a resumed run does some steps of the killed one again
            rows = self.path.read_text().splitlines() if self.path.exists() else []
            kept = [row for row in rows if json.loads(row)["step"] <= state.global_step]
            self.path.write_text("".join(f"{row}\n" for row in kept if state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def resume_folder(args: LoptiGRPOConfig) -> str | None:
    """The checkpoint to resume from; `auto` takes the newest whole one of the run, if any."""
    if args.resume_from_checkpoint != "auto":
        return args.resume_from_checkpoint
    return find_last_checkpoint(args.output_dir)


def build_trainer(
    task: TaskArguments, args: LoptiGRPOConfig, model: ModelConfig, tokenizer, train_set: "Dataset"
) -> LoptiGRPOTrainer:
    """The trainer of a run, with its console output and its log on disk."""
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    trainer = LoptiGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=functools.partial(kk.kk_reward, mode=task.reward_mode),
        args=args,
        train_dataset=train_set,
        processing_class=tokenizer,
        callbacks=[MetricsCallback(Path(args.output_dir) / "metrics.jsonl")],
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ConsoleCallback())
    return trainer


def run_config(*arguments) -> dict:
    """Every option that is not the default one, as JSON takes it, and the seed."""
    config = {}
    for group in arguments:
        for entry in fields(group):
            value, default = getattr(group, entry.name), entry.default
            if entry.default_factory is not MISSING:
                default = entry.default_factory()
            if value != default or entry.name == "seed":
                config[entry.name] = value
    return json.loads(json.dumps(config, default=str))


def main(task: TaskArguments, args: LoptiGRPOConfig, model: ModelConfig) -> dict:
    """Train, evaluate before and after, and write the run to `args.output_dir`:

    metrics.json (plan, evaluation, versions, log), metrics.jsonl (the log as it grows), the model
    with its card, and reward_curve.png. Returns the content of metrics.json.
    """
    console = Console(quiet=args.process_index != 0)
    tokenizer = load_tokenizer(model, args.trust_remote_code)
    train_set, test_set = load_datasets(task, tokenizer)
    plan = Plan.of(args, [len(ids) for ids in tokenizer(list(train_set["prompt"]))["input_ids"]])
    console.print(plan.table())
    checkpoint = resume_folder(args)
    if args.resume_from_checkpoint:
        console.print(f"Resuming from {checkpoint}." if checkpoint else "Nothing to resume from.")
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(task, args, model, tokenizer, train_set)

    metrics = output / "metrics.json"
    results = {
        "plan": asdict(plan),
        "config": run_config(task, args, model),
        "evaluation": {},
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
    }

    def save() -> None:
        if trainer.is_world_process_zero():
            metrics.write_text(json.dumps(results, indent=2))

    evaluate = functools.partial(evaluate_trainer, trainer, test_set, task.reward_mode)
    if checkpoint and metrics.exists():
        results["evaluation"] = json.loads(metrics.read_text())["evaluation"]
    elif test_set:
        results["evaluation"]["before"] = evaluate()
    save()
    trainer.train(resume_from_checkpoint=checkpoint)
    results["log"] = trainer.state.log_history
    save()
    trainer.save_model(args.output_dir)
    trainer.create_model_card(model_name=output.name)
    if trainer.is_world_process_zero():
        plot_reward_curve(results["log"], output / "reward_curve.png", title=plan.method)
    if test_set:
        results["evaluation"]["after"] = evaluate()
        save()
        console.print(evaluation_table(results["evaluation"]))
    console.print(f"Model, metrics.json and reward_curve.png are in {output}.")
    trainer.end()
    return results


def evaluation_table(evaluation: dict) -> Table:
    """Accuracy before and after, per number of people."""
    table = Table(title="Held-out accuracy")
    sizes = list(next(iter(evaluation["before"].values())))
    for column in ("", *(size if size == "average" else f"{size} people" for size in sizes)):
        table.add_column(column)
    for setting in evaluation["before"]:
        for moment in evaluation:
            accuracy = evaluation[moment][setting]
            table.add_row(f"{setting}, {moment}", *(f"{accuracy[size]:.3f}" for size in sizes))
    return table
