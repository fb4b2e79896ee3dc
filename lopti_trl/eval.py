"""`eval`: one YAML, tasks x metrics, for a model or the last checkpoints of a run."""

import functools
import gc
import hashlib
import importlib.metadata
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from trl import ModelConfig, get_quantization_config

from lopti_trl.checkpoint import what_is_broken
from lopti_trl.engines import Sampling, TransformersEngine, VLLMEngine
from lopti_trl.evaluation import (
    HeldOutArguments,
    Metric,
    estimate,
    evaluate,
    load_task,
    mean_scores,
    save_result,
)
from lopti_trl.train import CONFIGS, VERSIONED, load_tokenizer, make_parser, read_args


@dataclass
class EvalArguments(HeldOutArguments):
    """What to measure, and how completions are drawn."""

    tasks: list[str] = field(
        default_factory=lambda: ["kk"],
        metadata={
            "help": "kk, kk=SOURCE, or maths problems: a known name (math500, amc2023, aime2024, "
            "aime2025, minerva, olympiadbench, ...), NAME=SOURCE, or a SOURCE: a file or a data "
            "set on the hub."
        },
    )
    metrics: list[str] = field(
        default_factory=lambda: ["greedy", "sampled"],
        metadata={"help": "greedy, sampled (which is avg@1), avg@K, pass@K, maj@K."},
    )
    num_problems: int | None = field(
        default=None, metadata={"help": "A random choice of each maths set; none takes all."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Of every metric but greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Of every metric but greedy."})
    top_k: int = field(default=0, metadata={"help": "Of every metric but greedy; 0 is all."})
    max_completion_length: int = field(default=4096, metadata={"help": "In tokens."})
    seed: int = field(default=42, metadata={"help": "Of the samples."})
    last_checkpoints: int | None = field(
        default=None,
        metadata={
            "help": "Evaluate this many last checkpoints of the run in model_name_or_path, and "
            "their mean."
        },
    )
    engine: Literal["transformers", "vllm"] = field(
        default="transformers",
        metadata={"help": "transformers: a copy of the model in each process. vllm: one process."},
    )
    batch_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens, prompts and completions, that a process generates at a time; finished "
            "samples are written as often. none: 65,536 (transformers), 4,194,304 (vllm)."
        },
    )
    use_cpu: bool = field(default=False, metadata={"help": "Even if there is a GPU."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the model's own code."})
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "GPUs of vLLM."})
    vllm_gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "Share of a GPU's memory that vLLM takes."}
    )
    vllm_max_model_length: int | None = field(
        default=None, metadata={"help": "Prompt and completion; none is the model's own."}
    )
    output_dir: str = field(
        default="outputs/eval",
        metadata={"help": "For samples, results.json, scores.json and results.md."},
    )

    def __post_init__(self):
        for name in self.metrics:
            Metric.of(name)
        for name, least in (("last_checkpoints", 1), ("num_problems", 1), ("test_puzzles", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} leaves nothing to evaluate. Use {least} or more.")
        if self.temperature <= 0 and {Metric.of(m).draw for m in self.metrics} != {"greedy"}:
            raise ValueError(
                f"temperature={self.temperature} makes every sample the same. Use a positive one, "
                "or metrics: [greedy]."
            )


def parse_args(args: list[str]) -> tuple[EvalArguments, ModelConfig]:
    """As of `train`; a bare config name is looked up in configs/eval/."""
    parser = make_parser((EvalArguments, ModelConfig), prog="lopti-trl eval")
    return read_args(parser, args, CONFIGS / "eval")


def find_models(model: ModelConfig, last_checkpoints: int | None) -> dict[str, str]:
    """Label -> path or name of every model to evaluate, oldest checkpoint first."""
    name = model.model_name_or_path
    if name is None:
        raise ValueError("model_name_or_path is not set. Give a folder or a model on the hub.")
    if last_checkpoints is None:
        return {Path(name).name: name}
    paths = sort_checkpoints(name, PREFIX_CHECKPOINT_DIR) if Path(name).is_dir() else []
    whole = [path for path in paths if what_is_broken(Path(path)) is None]
    if len(whole) < last_checkpoints:
        raise ValueError(
            f"last_checkpoints={last_checkpoints}, but {name} has {len(whole)} whole ones. Ask for "
            "fewer, or give the output_dir of a run that saved more (save_steps, "
            "save_total_limit)."
        )
    return {Path(path).name: path for path in whole[-last_checkpoints:]}


def weights_mark(model: str) -> str:
    """Changes when the weights in a folder do; a model on the hub has its revision."""
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def make_engine(path: str, tokenizer, args: EvalArguments, model: ModelConfig):
    budget = {} if args.batch_tokens is None else {"batch_tokens": args.batch_tokens}
    if args.engine == "vllm":
        return VLLMEngine(
            path,
            tokenizer,
            **budget,
            revision=model.model_revision,
            dtype=model.dtype,
            trust_remote_code=args.trust_remote_code,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_len=args.vllm_max_model_length,
            seed=args.seed,
        )
    quantization = get_quantization_config(model)
    network = AutoModelForCausalLM.from_pretrained(
        path,
        revision=model.model_revision,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=args.trust_remote_code,
        quantization_config=quantization,
    )
    if quantization is None:
        network.to(PartialState().device)
    return TransformersEngine(network, tokenizer, **budget)


def main(args: EvalArguments, model: ModelConfig) -> dict:
    """Evaluate, print the table, write it to `args.output_dir`. Returns model -> estimates."""
    state = PartialState(cpu=args.use_cpu)
    console = Console(quiet=not state.is_main_process)
    models = find_models(model, args.last_checkpoints)
    model.model_name_or_path = next(iter(models.values()))
    tokenizer = load_tokenizer(model, args.trust_remote_code)
    if args.last_checkpoints is None:  # resolved by name
        models = dict.fromkeys(models, model.model_name_or_path)
    tasks = [load_task(spec, tokenizer, args, args.num_problems) for spec in args.tasks]
    if len({task.name for task in tasks}) < len(tasks):
        raise ValueError(f"tasks={args.tasks} name one twice. Give each a name: NAME=SOURCE.")
    output = Path(args.output_dir)
    names = ("temperature", "top_p", "top_k")
    sampling = Sampling(args.max_completion_length, **{name: getattr(args, name) for name in names})
    scores, samples = {}, {}
    for label, path in models.items():
        settings = {
            "model": path,
            "revision": model.model_revision,
            "weights": weights_mark(path),
            "dtype": model.dtype,
            "engine": args.engine,
        }
        engine = make_engine(path, tokenizer, args, model)
        run = functools.partial(evaluate, engine, tokenizer, tasks, args.metrics, sampling)
        result = run(args.seed, output / "samples" / label, settings, label)
        scores[label], samples[label] = result["scores"], result["samples"]
        del engine, run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if len(scores) > 1:
        scores[f"mean of {len(scores)}"] = mean_scores(list(scores.values()))
    estimates = {}
    if state.is_main_process:
        estimates = {
            label: {task: estimate(marks) for task, marks in of_tasks.items()}
            for label, of_tasks in scores.items()
        }
        facts = {
            "arguments": asdict(args) | {"model_name_or_path": model.model_name_or_path},
            "num_processes": state.num_processes,
            "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
        }
        result = {"scores": scores, "samples": samples}
        console.print(save_result(output, result, estimates, **facts))
        console.print(f"results.json, results.md and the samples are in {output}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        state.destroy_process_group()
    return estimates
