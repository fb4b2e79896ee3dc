"""What `doctor` checks: pure functions of what was asked for and what is there.

On a machine without a GPU, a recipe for GPUs is checked as a plan: what only the training machine
can tell is a warning there.
"""

import argparse
import json
import math
import urllib.request
from collections import defaultdict
from typing import NamedTuple

from trl import ModelConfig

from lopti_trl.config import TRICKS, LoptiGRPOConfig
from lopti_trl.memory import (
    Engine,
    ModelSize,
    Row,
    Setting,
    checkpoint_bytes,
    engine_sequences,
)
from lopti_trl.train import Plan, TaskArguments, method_name
from lopti_trl.vllm import SERVE, server_url

OK, WARN, FAIL = "ok", "warn", "FAIL"
TIGHT = 0.9  # share of the memory above which an estimate is too close to call
FEW_SEQUENCES = 8  # an engine that generates fewer at once is mostly idle


class Check(NamedTuple):
    name: str
    status: str  # OK, WARN or FAIL
    found: str
    fix: str = ""


class Launch(NamedTuple):
    """How the processes start, from an accelerate profile and the recipe."""

    name: str
    sharding: str  # none, ddp, fsdp, zero1, zero2 or zero3
    num_processes: int  # on all machines together
    num_machines: int = 1
    mixed_precision: str | None = None  # what the profile says
    checkpointing: bool = False  # FSDP's own
    offload_weights: bool = False
    offload_optimizer: bool = False
    deepspeed: dict = {}  # noqa: RUF012 (never written)

    @property
    def per_machine(self) -> int:
        return self.num_processes // self.num_machines


class Machine(NamedTuple):
    """What is here."""

    gpus: list[float]  # memory of each, in GB
    bf16: bool  # whether the GPUs have it
    ram: float  # free, in GB
    packages: dict[str, str]  # name and version of those that a recipe may need
    vllm_complaint: str = ""  # TRL's, if the version is out of its range


class Run(NamedTuple):
    """What the checks look at."""

    task: TaskArguments
    args: LoptiGRPOConfig
    model: ModelConfig
    launch: Launch
    machine: Machine
    gpu_memory_gb: float

    @property
    def is_elsewhere(self) -> bool:
        """Whether the recipe is for GPUs and there is none here."""
        return not self.args.use_cpu and not self.machine.gpus

    @property
    def here(self) -> str:
        """How bad it is that this machine lacks something."""
        return WARN if self.is_elsewhere else FAIL

    @property
    def asked_precision(self) -> str:
        return "fp16" if self.args.fp16 else "bf16" if self.args.bf16 else "no"

    @property
    def precision(self) -> str:
        """What accelerate computes in: the recipe's word counts before the profile's."""
        asked = self.asked_precision
        return asked if asked != "no" else self.launch.mixed_precision or "no"

    @property
    def bits(self) -> int:
        """Of a base weight."""
        return 4 if self.model.load_in_4bit else 8 if self.model.load_in_8bit else 16


def judge(
    name: str,
    found: str,
    *rules: tuple[bool, str, str, str],  # holds, status, what is wrong, fix
) -> Check:
    """The first rule that holds, or all is well."""
    for holds, status, wrong, fix in rules:
        if holds:
            return Check(name, status, f"{found}: {wrong}" if wrong else found, fix)
    return Check(name, OK, found)


# The launch


def check_batch(raw: argparse.Namespace, launch: Launch) -> Check:
    """TRL wants whole groups: processes x micro-batch x steps a multiple of num_generations.

    Takes the options as given, since LoptiGRPOConfig refuses others.
    """
    rows = raw.per_device_train_batch_size * launch.num_processes
    steps = raw.steps_per_generation or raw.gradient_accumulation_steps
    batch, group = raw.generation_batch_size or rows * steps, max(raw.num_generations, 1)
    divisors = [str(n) for n in range(2, min(batch, 64) + 1) if batch % n == 0]
    return judge(
        "batch",
        f"{batch} completions a rollout batch, {launch.num_processes} processes, "
        f"num_generations {group}",
        (
            batch % group != 0,
            FAIL,
            "no whole groups",
            f"Set steps_per_generation to a multiple of {group // math.gcd(group, rows)}, or "
            f"num_generations to one of {', '.join(divisors)}.",
        ),
        (
            batch % rows != 0,
            FAIL,
            "no whole micro-batches",
            f"Set generation_batch_size to a multiple of {rows}.",
        ),
    )


def check_launch(run: Run) -> Check:
    launch, args = run.launch, run.args
    return judge(
        "launch",
        f"{launch.name}, {launch.num_processes} x {launch.sharding}",
        (
            args.use_cpu and (launch.sharding == "fsdp" or bool(launch.deepspeed)),
            FAIL,
            "on CPU, FSDP and DeepSpeed silently train separate copies",
            "Use single_gpu or ddp, or set use_cpu to false on a machine with GPUs.",
        ),
        (
            launch.sharding == "none" and launch.num_processes > 1,
            FAIL,
            "this profile silently starts one process",
            "Use ddp, zero2, zero3 or fsdp2 for several.",
        ),
        (
            launch.num_processes % launch.num_machines != 0,
            FAIL,
            f"not the same number on each of {launch.num_machines} machines",
            "num_processes counts all machines: make it a multiple of num_machines.",
        ),
        (
            bool(args.deepspeed) and launch.mixed_precision is not None,
            FAIL,
            "both the profile and the recipe's deepspeed option configure the launch",
            "Keep one of the two.",
        ),
        (
            launch.checkpointing and args.activation_checkpointing,
            FAIL,
            "both fsdp_activation_checkpointing and activation_checkpointing are on",
            "Set fsdp_activation_checkpointing to false in the profile.",
        ),
    )


def check_machine(run: Run) -> Check:
    launch, gpus = run.launch, run.machine.gpus
    if run.args.use_cpu:
        return Check("machine", OK, f"CPU, {run.machine.ram:.0f} GB of memory free")
    if not gpus:
        found = f"no GPU here: a plan for {launch.num_processes} x {run.gpu_memory_gb:g} GB"
        return Check("machine", WARN, found, "Run doctor again where you will train.")
    return judge(
        "machine",
        f"{len(gpus)} GPUs of {min(gpus):.0f} GB for {launch.per_machine} processes",
        (
            launch.per_machine > len(gpus),
            FAIL,
            "too few",
            f"Set num_processes to {len(gpus)} a machine.",
        ),
        (
            launch.num_processes == 1 and len(gpus) > 1,
            FAIL,
            "TRL refuses nn.DataParallel",
            "Launch with a profile of several processes, or set CUDA_VISIBLE_DEVICES=0.",
        ),
    )


def check_precision(run: Run) -> Check:
    asked, profile = run.asked_precision, run.launch.mixed_precision
    return judge(
        "precision",
        f"{run.precision}, weights loaded as {run.model.dtype}",
        (
            run.precision == "fp16" and run.args.use_cpu,
            FAIL,
            "fp16 needs a GPU",
            "Set fp16 and bf16 to false.",
        ),
        (
            run.precision == "bf16" and bool(run.machine.gpus) and not run.machine.bf16,
            FAIL,
            "this GPU has no bf16",
            "Set bf16 to false and fp16 to true.",
        ),
        (
            run.launch.deepspeed.get(asked, {}).get("enabled") is False,
            FAIL,
            f"the DeepSpeed config switches {asked} off",
            f'Set "{asked}": {{"enabled": "auto"}} there.',
        ),
        (
            profile not in (None, asked),
            WARN,
            f"the profile says {profile}, the recipe {asked}",
            f"Set mixed_precision to {asked!r} in the profile, or change the recipe.",
        ),
        (
            run.precision == "bf16" and run.args.use_cpu,
            WARN,
            "slow on CPU",
            "Set bf16 to false.",
        ),
    )


def check_packages(run: Run) -> Check:
    args, packages = run.args, run.machine.packages
    needed = {
        "vllm": args.use_vllm,
        "requests": args.use_vllm and args.vllm_mode == "server",
        "deepspeed": bool(run.launch.deepspeed),
        "bitsandbytes": run.bits < 16,
        "math-verify": run.task.task == "math",
    }
    wanted = [name for name, is_needed in needed.items() if is_needed]
    missing = [name for name in wanted if name not in packages]
    versions = [f"{name} {packages.get(name, 'missing')}" for name in wanted]
    return judge(
        "packages",
        ", ".join(versions) or "nothing beyond the base",
        (bool(missing), run.here, "", f"pip install {' '.join(missing)}"),
        (
            args.use_vllm and bool(run.machine.vllm_complaint),
            WARN,
            run.machine.vllm_complaint,
            "Install a version in TRL's range.",
        ),
    )


# The recipe


def check_combinations(run: Run) -> list[Check]:
    """Settings that are fine alone and not together: all that hold."""
    args, bits, sharding = run.args, run.bits, run.launch.sharding
    adapter, quantized = run.model.use_peft, run.bits < 16
    dropout = run.model.lora_dropout
    rules = (
        (
            quantized and not adapter,
            FAIL,
            f"load_in_{bits}bit without use_peft: quantized weights cannot train",
            "Set use_peft to true.",
        ),
        (
            quantized and sharding == "fsdp",
            FAIL,
            "quantized weights under FSDP: PEFT cannot merge their shards for a rollout (trl#5975)",
            "Use ddp or single_gpu, or set load_in_4bit and load_in_8bit to false.",
        ),
        (
            bits == 8 and args.use_vllm,
            FAIL,
            "load_in_8bit with vLLM, which has no 8-bit quantization in flight",
            "Use load_in_4bit, or neither.",
        ),
        (
            quantized and sharding == "zero3",
            WARN,
            "quantized weights under ZeRO-3: merging was reported to fail (axolotl#2738)",
            "Use ddp or single_gpu.",
        ),
        (
            bits == 4 and args.use_vllm,
            WARN,
            "load_in_4bit with vLLM: merged weights are rounded to 4 bits again, so rollouts are a "
            "little off-policy (trl#6007)",
            "Watch sampling/sampling_logp_difference; vllm_importance_sampling_correction helps.",
        ),
        (
            quantized and args.use_vllm and args.vllm_mode == "server",
            WARN,
            "quantized weights with a vLLM server, which must hold them quantized alike",
            "Start it with --quantization bitsandbytes, or use vllm_mode colocate.",
        ),
        (
            args.use_vllm and sharding == "zero3" and not args.ds3_gather_for_generation,
            FAIL,
            "ds3_gather_for_generation false with vLLM",
            "Set it to true.",
        ),
        (
            not args.use_vllm and sharding == "zero3" and args.ds3_gather_for_generation,
            WARN,
            "ZeRO-3 without vLLM is slow: every GPU gathers the whole model for each rollout",
            "Set use_vllm to true, or use zero2 or ddp.",
        ),
        (
            not args.use_vllm
            and (
                sharding == "fsdp" or (sharding == "zero3" and not args.ds3_gather_for_generation)
            ),
            WARN,
            f"{sharding} without vLLM is very slow: weights are gathered for every token",
            "Set use_vllm to true, or use zero2 or ddp.",
        ),
        (
            args.sync_ref_model and (args.beta == 0 or adapter),
            FAIL,
            "sync_ref_model without a reference model (beta is 0, or PEFT is on)",
            "Set it to false.",
        ),
        (
            adapter and dropout > 0,
            WARN,
            f"lora_dropout {dropout}: ratios to pi_old are not 1 before the first update",
            "Set lora_dropout to 0.",
        ),
    )
    found = [Check("together", status, wrong, fix) for holds, status, wrong, fix in rules if holds]
    return found or [Check("together", OK, "no combination that is known to fail")]


def check_update_options(run: Run) -> Check:
    """Which update_ options are in force, and why the others are not."""
    args, inexact = run.args, run.args.inexact_tricks()
    on = [name for name in TRICKS if name in args.update_tricks]
    default = "set to false" if args.uses_token_probs else "no method is on"
    off = defaultdict(list)
    for name in TRICKS:
        if name not in on:
            off[inexact.get(name, default)].append(name)
    found = "; ".join(
        [f"on: {', '.join(on) or 'none'}"]
        + [f"off: {', '.join(names)} ({reason})" for reason, names in off.items()]
    )
    return Check("update_ options", OK, found)


def check_data(lengths: list[int], plan: Plan, estimated: str) -> Check:
    return judge(
        "data",
        f"{len(lengths):,} prompts of up to {max(lengths)} tokens, "
        f"{plan.prompts_per_rollout_batch} a rollout batch",
        (
            bool(estimated),
            WARN,
            estimated,
            "Download the model and the data, or run doctor where the hub is reached.",
        ),
    )


def check_phases(run: Run, plan: Plan) -> Check:
    steps, accumulation = (
        plan.optimizer_steps_per_rollout_batch,
        run.args.gradient_accumulation_steps,
    )
    return judge(
        "phases",
        f"{method_name(run.args)}: {steps:g} optimizer steps a rollout batch, each of "
        f"{accumulation} micro-batches",
        (
            steps != int(steps),
            WARN,
            "optimizer steps span rollout batches, so the update_ options are off",
            f"Set steps_per_generation to a multiple of {accumulation}.",
        ),
    )


def check_schedule(run: Run, plan: Plan) -> Check:
    args = run.args
    return judge(
        "schedule",
        f"{args.lr_scheduler_type.value} over {plan.optimizer_steps:,} optimizer steps, "
        f"warmup {args.warmup_steps:g}",
        (
            "scheduler" in run.launch.deepspeed,
            WARN,
            "the DeepSpeed config's scheduler replaces it, and ticks on every engine step, Lopti's "
            "second phase included",
            f"Delete it there, or write it for {plan.optimizer_steps} steps.",
        ),
    )


def check_length(run: Run, prompt_length: int, size: ModelSize | None) -> Check:
    """Prompt and completion fit in the engine and in the model."""
    args = run.args
    needed = prompt_length + args.max_completion_length
    engine = (args.vllm_max_model_length if args.use_vllm else None) or needed
    model = size.max_length if size else engine
    return judge(
        "length",
        f"prompt {prompt_length} + completion {args.max_completion_length} = {needed} tokens",
        (
            engine < needed,
            FAIL,
            f"vllm_max_model_length is {engine}",
            f"Set vllm_max_model_length to {needed} or more.",
        ),
        (
            max(needed, engine) > model,
            FAIL,
            f"the model stops at {model}",
            f"Set max_completion_length to {model - prompt_length} or less, and "
            f"vllm_max_model_length to {model} or less.",
        ),
    )


# vLLM


def fetch(url: str, timeout: float = 3.0) -> bytes:
    """Raises OSError (urllib's errors are) if there is no answer, or a bad one."""
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return response.read()


def check_server(run: Run, needed_length: int) -> Check:
    """Does the server answer, take new weights, and hold whole sequences?"""
    args = run.args
    url = server_url(args)
    try:
        fetch(f"{url}/health")
        served = json.loads(fetch(f"{url}/v1/models"))["data"][0]
    except (OSError, ValueError, LookupError) as error:
        fix = f"Start it ({SERVE}), or set vllm_server_base_url."
        return Check("vLLM server", FAIL, f"{url} does not answer: {error}", fix)
    try:
        info = json.loads(fetch(f"{url}/server_info?config_format=json"))["vllm_config"]
    except (OSError, ValueError, LookupError):  # served in development mode alone
        info = {}
    length = served.get("max_model_len") or needed_length
    logprobs = info.get("model_config", {}).get("logprobs_mode")
    return judge(
        "vLLM server",
        f"{url} serves {served['id']}, sequences of {length} tokens",
        (
            not info.get("weight_transfer_config"),
            FAIL,
            "it takes no new weights",
            f"Restart it: {SERVE}",
        ),
        (
            length < needed_length,
            FAIL,
            f"prompt and completion take {needed_length}",
            f"Restart it with --max-model-len {needed_length}.",
        ),
        (
            args.vllm_importance_sampling_correction and logprobs != "processed_logprobs",
            WARN,
            f"its logprobs_mode is {logprobs}, which biases vllm_importance_sampling_correction",
            f"Restart it: {SERVE}",
        ),
        (
            "0.0.0.0" in url and run.launch.num_machines > 1,
            WARN,
            "another machine cannot reach that address",
            "Name the server's host in vllm_server_base_url.",
        ),
    )


def check_colocation(run: Run, size: ModelSize | None) -> Check:
    launch, parallel = run.launch, run.args.vllm_tensor_parallel_size
    return judge(
        "vLLM",
        f"colocated, tensor parallel over {parallel}, "
        + ("asleep during updates" if run.args.vllm_enable_sleep_mode else "always awake"),
        (
            launch.num_processes % parallel != 0,
            FAIL,
            f"that does not divide {launch.num_processes} processes",
            f"Set vllm_tensor_parallel_size to a divisor of {launch.num_processes}.",
        ),
        (
            size is not None and size.heads % parallel != 0,
            FAIL,
            f"that does not divide {size.heads if size else 0} attention heads",
            "Set vllm_tensor_parallel_size to a common divisor of heads and processes.",
        ),
        (
            launch.per_machine % parallel != 0,
            WARN,
            f"an engine spans machines of {launch.per_machine} processes",
            f"Set vllm_tensor_parallel_size to a divisor of {launch.per_machine}.",
        ),
    )


# Memory and disk


def check_model(run: Run, size: ModelSize, origin: str) -> Check:
    found = f"{size.parameters:,} parameters ({origin})"
    if run.model.use_peft:
        share = size.trainable / size.parameters
        found += f", of which the adapter's {size.trainable:,} train ({share:.2%})"
    return Check("model", OK, found)


REMEDIES = {
    "weights": "shard them (zero3, fsdp2) or train an adapter",
    "reference": "set beta to 0, or shard it (zero3, fsdp2)",
    "gradients": "shard them (zero2, zero3, fsdp2) or train an adapter",
    "optimizer": "shard it (zero2, zero3, fsdp2) or train an adapter",
    "copies": "turn activation_checkpointing on",
    "activations": "turn activation_checkpointing on, or lower per_device_train_batch_size and "
    "raise gradient_accumulation_steps and steps_per_generation",
    "head": "lower per_device_train_batch_size",
    "key-value cache": "set use_vllm to true, or lower steps_per_generation",
    "vLLM": "turn vllm_enable_sleep_mode on, or lower vllm_gpu_memory_utilization",
}


def check_memory(run: Run, rows: list[Row]) -> Check:
    """The larger of the update's and the rollout's peak against a GPU, or a process's RAM."""
    limit, device = run.gpu_memory_gb, "a GPU"
    if run.args.use_cpu:
        limit, device = run.machine.ram / run.launch.num_processes, "memory a process"
    moment = max(("update", "rollout"), key=lambda name: sum(getattr(row, name) for row in rows))
    peak = sum(getattr(row, moment) for row in rows) / 1e9
    largest = sorted(rows, key=lambda row: getattr(row, moment), reverse=True)[:2]
    fix = "; ".join(f"{row.name}: {REMEDIES[row.name]}" for row in largest)
    return judge(
        "memory",
        f"{peak:.3g} of {limit:.3g} GB {device}, in the {moment}",
        (peak > limit, FAIL, "does not fit", fix),
        (peak > TIGHT * limit, WARN, "too close to call", fix),
    )


def check_engine(size: ModelSize, setting: Setting, engine: Engine) -> Check:
    """A key-value cache that holds one longest sequence, or vLLM does not start; better many."""
    sequences = math.floor(engine_sequences(size, setting, engine))
    wanted = setting.rollouts * engine.tensor_parallel
    return judge(
        "vLLM cache",
        f"{max(sequences, 0)} sequences of {engine.length} tokens at once, {wanted} a rollout "
        "batch and engine",
        (
            sequences < 1,
            FAIL,
            "vLLM would not start",
            "Raise vllm_gpu_memory_utilization, or lower vllm_max_model_length.",
        ),
        (
            sequences < min(wanted, FEW_SEQUENCES),
            WARN,
            "generation will be slow",
            "Raise vllm_gpu_memory_utilization.",
        ),
    )


def count_checkpoints(args: LoptiGRPOConfig, optimizer_steps: int) -> int:
    """How many lie on the disk at once: the kept ones and the one in the making."""
    interval = args.save_steps if args.save_steps >= 1 else args.save_steps * optimizer_steps
    saves = {
        "no": 0,
        "epoch": math.ceil(args.num_train_epochs),
        "steps": math.ceil(optimizer_steps / interval),
    }.get(args.save_strategy.value, 1)
    return min(saves, (args.save_total_limit or saves) + 1)


def check_disk(
    run: Run, size: ModelSize, setting: Setting, optimizer_steps: int, free_gb: float
) -> Check:
    each = checkpoint_bytes(size, setting, run.args.save_only_model) / 1e9
    model = checkpoint_bytes(size, setting, weights_only=True) / 1e9
    count = count_checkpoints(run.args, optimizer_steps)
    needed = count * each + model
    return judge(
        "disk",
        f"{needed:.3g} GB: {count} checkpoints of {each:.3g} and the model; {free_gb:.3g} GB free",
        (
            needed > free_gb,
            run.here,
            "",
            "Lower save_total_limit, set save_only_model (no resuming), or move output_dir.",
        ),
    )
