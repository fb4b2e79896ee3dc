"""`train`: one YAML, a plan, a training run with evaluation before and after, its results."""

import functools
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, ProgressCallback, TrainerCallback, TrainingArguments
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from lopti_trl.checkpoint import find_last_checkpoint
from lopti_trl.config import LoptiGRPOConfig
from lopti_trl.evaluation import (
    EvaluationCallback,
    HeldOutArguments,
    Metric,
    Task,
    accuracy,
    evaluate_trainer,
    kk_task,
    load_task,
)
from lopti_trl.figures import plot_reward_curve
from lopti_trl.tasks import code, dialogue, kk, math, summarize
from lopti_trl.trainer import LoptiGRPOTrainer

if TYPE_CHECKING:
    from datasets import Dataset

PACKAGE = Path(__file__).parent
CONFIGS = PACKAGE.parent / "configs"
TINY_MODEL = "kk-tiny"  # ships with the package
VERSIONED = ("lopti-trl", "torch", "trl", "transformers", "accelerate")


@dataclass
class TaskArguments(HeldOutArguments):
    """What to train and evaluate on and how answers are judged."""

    task: Literal["kk", "math", "dialogue", "summarize", "code"] = field(
        default="kk",
        metadata={
            "help": "kk: Knights-and-Knaves puzzles. math: problems with a boxed answer. "
            "dialogue: HH, by a reward model. summarize: CNN/DailyMail, by ROUGE-L. code: "
            "HumanEval and MBPP, by unit tests in a sandbox."
        },
    )
    dataset: str = field(
        default="generated",
        metadata={
            "help": "generated (kk), a .parquet, .jsonl or .json file (the official K&K files "
            "too), a data set on the hub, or a known name of maths problems: deepscaler, orz57k, "
            "math, gsm8k."
        },
    )
    eval_dataset: str = field(
        default="generated", metadata={"help": "Held-out puzzles, given as `dataset` is."}
    )
    train_puzzles: int = field(default=900, metadata={"help": "Training puzzles of each size."})
    train_problems: int | None = field(
        default=None, metadata={"help": "A random choice of the maths problems; none takes all."}
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Leave longer maths problems out of training."}
    )
    eval_tasks: list[str] | None = field(
        default=None,
        metadata={
            "help": "What to evaluate on, as `tasks` of lopti-trl eval. none: for kk the puzzles "
            "of eval_dataset, for math nothing."
        },
    )
    eval_metrics: list[str] = field(
        default_factory=lambda: ["greedy", "sampled"],
        metadata={"help": "greedy, sampled (which is avg@1), avg@K, pass@K, maj@K."},
    )
    eval_temperature: float = field(
        default=1.0, metadata={"help": "Of every metric but greedy, whatever that of rollouts."}
    )
    eval_every_rollouts: int | None = field(
        default=None,
        metadata={
            "help": "Evaluate after every so many rollout batches too, not only before and after: "
            "at the same data for every method."
        },
    )
    eval_average: int = field(
        default=3,
        metadata={"help": "Report the mean of so many last evaluations, as the paper does."},
    )

    train_rows: int | None = field(
        default=None,
        metadata={
            "help": "Rows of `dataset` to train on, drawn by dataset_seed, for tasks other than "
            "kk. None takes all."
        },
    )
    test_rows: int = field(
        default=100,
        metadata={
            "help": "Rows of `eval_dataset`, likewise. They are evaluated as eval_strategy says."
        },
    )
    max_prompt_characters: int | None = field(
        default=None,
        metadata={
            "help": "Longer articles are cut, longer dialogues and code descriptions left out."
        },
    )
    reward_model: str | None = field(
        default=None,
        metadata={"help": "Task dialogue: a sequence classifier with one output; hub or folder."},
    )

    def __post_init__(self):
        for name in self.eval_metrics:
            Metric.of(name)
        if self.task == "math" and self.dataset == "generated":
            raise ValueError(
                "dataset=generated has no maths problems. Set dataset to a known name "
                f"({', '.join(math.NAMED)}), a file, or a data set on the hub."
            )
        for name in ("eval_every_rollouts", "eval_average"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} leaves nothing to evaluate. Use 1 or more.")


def find_config(name: str, folder: Path = CONFIGS) -> Path:
    """A path as given, or a bare name from `folder`. FileNotFoundError lists what is there."""
    path = Path(name)
    candidates = [path, folder / path] if path.name == name else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    recipes = ", ".join(sorted(p.name for p in folder.glob("*.yaml")))
    raise FileNotFoundError(f"No config {name}. Give a path, or one of {folder}: {recipes}.")


def make_parser(
    arguments: tuple[type, ...] = (TaskArguments, LoptiGRPOConfig, ModelConfig), prog: str = "train"
) -> TrlParser:
    """TRL's parser over our arguments, in which every optional option can be set to `none`."""
    parser = TrlParser(arguments, prog=prog)
    for action in parser._actions:
        # argparse cannot say None, without which a YAML's lopti_eta could not be turned off
        if action.type in (int, float) and action.default is None:
            action.type = functools.partial(_none_or, action.type)
    return parser


def _none_or(kind: type, text: str):
    return None if text.lower() in ("none", "null") else kind(text)


def parse_args(
    args: list[str], config: type = LoptiGRPOConfig
) -> tuple[TaskArguments, LoptiGRPOConfig, ModelConfig]:
    """Command line beats YAML beats defaults; unknown keys raise."""
    return read_args(make_parser((TaskArguments, config, ModelConfig)), args, CONFIGS)


def read_args(parser: TrlParser, args: list[str], folder: Path) -> tuple:
    args = list(args)
    if "--config" in args:
        position = args.index("--config") + 1
        if position == len(args):
            raise ValueError("--config needs the name of a YAML file after it.")
        args[position] = str(find_config(args[position], folder))
    return parser.parse_args_and_config(args)


def model_path(name: str) -> str:
    """A model's name, or the folder of the one that ships with the package."""
    return str(PACKAGE / "assets" / TINY_MODEL) if name == TINY_MODEL else name


def model_init_kwargs(model: ModelConfig, args: TrainingArguments) -> dict:
    """What the model is loaded with; what the recipe's model_init_kwargs say beats the options."""
    return {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }


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


class RowTask(NamedTuple):
    """A task whose data are rows of a file or of the hub."""

    load: Callable[..., "Dataset"]
    reward: Callable[..., list[float | None]] | None  # None: the reward is a model's


ROW_TASKS = {
    "dialogue": RowTask(dialogue.load_dialogues, None),
    "summarize": RowTask(summarize.load_articles, summarize.rouge_reward),
    "code": RowTask(code.load_problems, code.code_reward),
}


def load_rows(task: TaskArguments) -> tuple["Dataset", "Dataset | None"]:
    """Training and held-out rows of a task of ROW_TASKS, prompts as messages."""
    if task.dataset == "generated":
        raise ValueError(
            f"dataset=generated, but task={task.task} generates none. Give a .parquet, .jsonl or "
            ".json file, or a data set on the hub."
        )
    if ROW_TASKS[task.task].reward is None and task.reward_model is None:
        raise ValueError(
            f"reward_model is not set, but task={task.task} is rewarded by one. Give a sequence "
            "classifier with one output, on the hub or in a folder."
        )
    load = functools.partial(
        ROW_TASKS[task.task].load,
        seed=task.dataset_seed,
        max_characters=task.max_prompt_characters,
    )
    train = load(task.dataset, "train", num_rows=task.train_rows)
    if task.eval_dataset == "generated" or not task.test_rows:
        return train, None
    return train, load(task.eval_dataset, "test", num_rows=task.test_rows)


def reward_arguments(task: TaskArguments, trust_remote_code: bool = False) -> dict:
    """GRPOTrainer's arguments that say how completions are judged."""
    if task.task == "kk":
        return {"reward_funcs": functools.partial(kk.kk_reward, mode=task.reward_mode)}
    if task.task == "math":
        math.require_judge()
        return {"reward_funcs": math.math_reward}
    reward = ROW_TASKS[task.task].reward
    if reward is not None:
        return {"reward_funcs": reward}
    model, tokenizer = dialogue.load_reward_model(task.reward_model, trust_remote_code)
    return {"reward_funcs": model, "reward_processing_classes": tokenizer}


def prompt_lengths(prompts: Sequence[str | list[dict]], tokenizer) -> list[int]:
    """Tokens of each prompt, text or messages, as the trainer sees it."""
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    return [len(ids) for ids in tokenizer(texts)["input_ids"]]


def load_datasets(task: TaskArguments, tokenizer) -> tuple["Dataset", "Dataset | None"]:
    """Training rows and held-out puzzles of eval_dataset, prompts rendered; or those of a task."""
    if task.task == "math":
        return load_problems(task, tokenizer), None
    if task.task in ROW_TASKS:
        return load_rows(task)
    load = functools.partial(
        kk.load_puzzles, num_people=task.num_people, seed=task.dataset_seed, tokenizer=tokenizer
    )
    train = load(task.dataset, "train", num_puzzles=task.train_puzzles)
    if not task.test_puzzles or task.eval_tasks is not None:
        return train, None
    return train, load(task.eval_dataset, "test", num_puzzles=task.test_puzzles)


def load_problems(task: TaskArguments, tokenizer) -> "Dataset":
    """Maths problems to train on, the too long ones left out if there is a tokenizer to tell."""
    style = task.prompt_style if tokenizer else "base"
    problems = math.load_problems(
        task.dataset,
        num_problems=task.train_problems,
        seed=task.dataset_seed,
        tokenizer=tokenizer,
        style=style,
    )
    if tokenizer is None or task.max_prompt_tokens is None:
        return problems
    lengths = prompt_lengths(problems["prompt"], tokenizer)
    return problems.select([i for i, n in enumerate(lengths) if n <= task.max_prompt_tokens])


def load_held_out(task: TaskArguments, puzzles: "Dataset | None", tokenizer) -> list[Task]:
    """What to evaluate on; nothing if the list is empty."""
    if puzzles:
        return [kk_task(puzzles, task.reward_mode)]
    if not task.test_puzzles or task.task in ROW_TASKS:
        return []
    return [load_task(spec, tokenizer, task) for spec in task.eval_tasks or []]


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
    parts = ["GRPO" if args.advantage == "grpo" else "REINFORCE++"]
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
    if args.diw:
        parts.append(f"DIW (xi {args.diw_xi_start:g} to {args.diw_xi_end:g})")
    if args.raft:
        parts.append("RAFT")
    return " + ".join(parts)


class ConsoleCallback(ProgressCallback):
    """Trainer's progress bar with one short line a log, in place of TRL's thirty metrics."""

    SHOWN = (
        ("rollout_batches", "rollout batch"),
        ("reward", "reward"),
        ("kk/correct", "correct"),
        ("math/correct", "correct"),
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
    task: TaskArguments,
    args: LoptiGRPOConfig,
    model: ModelConfig,
    tokenizer,
    train_set: "Dataset",
    eval_set: "Dataset | None" = None,  # evaluated by TRL, as eval_strategy says
) -> LoptiGRPOTrainer:
    """The trainer of a run, with its console output and its log on disk."""
    args.model_init_kwargs = model_init_kwargs(model, args)
    trainer = LoptiGRPOTrainer(
        model=model.model_name_or_path,
        **reward_arguments(task, args.trust_remote_code),
        args=args,
        train_dataset=train_set,
        eval_dataset=eval_set,
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
    config = run_config(task, args, model)  # as given: loading replaces kk-tiny by a private path
    tokenizer = load_tokenizer(model, args.trust_remote_code)
    train_set, test_set = load_datasets(task, tokenizer)
    eval_set = None
    if task.task in ROW_TASKS:  # the others are evaluated here, rows by TRL
        test_set, eval_set = None, test_set
    tasks = load_held_out(task, test_set, tokenizer)
    plan = Plan.of(args, prompt_lengths(train_set["prompt"], tokenizer))
    console.print(plan.table())
    checkpoint = resume_folder(args)
    if args.resume_from_checkpoint:
        console.print(f"Resuming from {checkpoint}." if checkpoint else "Nothing to resume from.")
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(task, args, model, tokenizer, train_set, eval_set)

    metrics = output / "metrics.json"
    results = {
        "plan": asdict(plan),
        "config": config,
        "evaluation": {},
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
    }

    def save() -> None:
        if trainer.is_world_process_zero():
            metrics.write_text(json.dumps(results, indent=2))

    how = {"tasks": tasks, "metrics": task.eval_metrics, "temperature": task.eval_temperature}
    every_steps = round((task.eval_every_rollouts or 0) * plan.optimizer_steps_per_rollout_batch)
    evaluations = EvaluationCallback(trainer, max(1, every_steps), output / "evaluation", **how)
    if tasks and task.eval_every_rollouts:
        trainer.add_callback(evaluations)

    def evaluate(moment: str) -> dict[str, dict[str, float]]:
        folder = output / "evaluation" / moment
        return accuracy(evaluate_trainer(trainer, folder=folder, label=moment, **how))

    if checkpoint and metrics.exists():
        before = json.loads(metrics.read_text())["evaluation"].get("before")
        results["evaluation"] = {"before": before} if before else {}
    elif tasks:
        results["evaluation"]["before"] = evaluate("before")
    save()
    trainer.train(resume_from_checkpoint=checkpoint)
    results["log"] = trainer.state.log_history
    save()
    trainer.save_model(args.output_dir)
    trainer.create_model_card(model_name=output.name)
    if trainer.is_world_process_zero():
        plot_reward_curve(results["log"], output / "reward_curve.png", title=plan.method)
    if tasks:
        done = evaluations.scores.get(trainer.state.global_step)
        results["evaluation"]["after"] = accuracy(done) if done else evaluate("after")
        if evaluations.scores:
            count = min(task.eval_average, len(evaluations.scores))
            mean = accuracy(evaluations.mean_of_last(count))
            results["evaluation"][f"mean of last {count}"] = mean
        save()
        console.print(evaluation_table(results["evaluation"]))
    console.print(f"Model, metrics.json and reward_curve.png are in {output}.")
    trainer.end()
    return results


def evaluation_table(evaluation: dict) -> Table:
    """Accuracy before and after, per number of people or maths benchmark."""
    table = Table(title="Held-out accuracy")
    first = next(iter(evaluation.values()))
    sizes = list(next(iter(first.values())))
    for column in ("", *(f"{size} people" if size.isdigit() else size for size in sizes)):
        table.add_column(column)
    for setting in first:
        for moment in evaluation:
            accuracy = evaluation[moment][setting]
            table.add_row(f"{setting}, {moment}", *(f"{accuracy[size]:.3f}" for size in sizes))
    return table
