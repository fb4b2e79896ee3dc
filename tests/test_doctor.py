"""Levels 1, 2 and 5: the estimates by hand, every check, every recipe under every profile."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub.constants
import pytest
import torch
import yaml
from peft import LoraConfig
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from lopti_trl import doctor
from lopti_trl.checks import FAIL, OK, WARN, Machine, count_checkpoints
from lopti_trl.config import LoptiGRPOConfig
from lopti_trl.doctor import KNOWN_MODELS, examine, find_profile, known_config, parse_for
from lopti_trl.memory import (
    Engine,
    Setting,
    activation_bytes,
    checkpoint_bytes,
    engine_sequences,
    engine_weight_bytes,
    gradient_bytes,
    head_bytes,
    kv_bytes_per_token,
    layer_bytes_per_token,
    measure_model,
    optimizer_bytes,
    reference_bytes,
    weight_bytes,
    working_bytes,
)
from lopti_trl.train import CONFIGS, PACKAGE

ROOT = PACKAGE.parent
SCRIPT = ROOT / "scripts" / "train.slurm"
PROFILES = sorted(path.stem for path in (CONFIGS / "accelerate").glob("*.yaml"))
QWEN_7B = "Qwen/Qwen2.5-7B-Instruct-1M"
INSTALLED = {"vllm": "0.30.0", "deepspeed": "0.19.8", "bitsandbytes": "0.50.0", "requests": "2"}
LAPTOP = Machine(gpus=[], bf16=False, ram=16.0, packages={"deepspeed": "0.19.8"})
NODE = Machine(gpus=[80.0] * 4, bf16=True, ram=500.0, packages=INSTALLED)


# Estimates. P = 7,615,616,512 of Qwen2.5-7B


@pytest.fixture(scope="module")
def qwen_7b():
    return measure_model(known_config(QWEN_7B))


def setting(**changes) -> Setting:
    """The 7B recipe on four GPUs."""
    values = {
        "sharding": "none",
        "processes": 4,
        "weight_bytes": 4,
        "compute_bytes": 2,
        "optimizer_bytes": 8,
        "micro_batch": 8,
        "prompt_length": 400,
        "completion_length": 4096,
        "checkpointing": True,
        "rollouts": 128,
    }
    return Setting(**{**values, **changes})


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        (QWEN_7B, 7_615_616_512),
    ],
)
def test_meta_models_have_the_published_number_of_parameters(name, published):
    assert measure_model(known_config(name)).parameters == published


def test_an_adapters_parameters_are_counted_exactly():
    config = known_config("Qwen/Qwen2.5-1.5B-Instruct")
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    # r (in + out) of q, k, v, o, gate, up and down, in 28 layers; none for the head
    widths = 2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960)
    size = measure_model(config, lora)
    assert size.trainable == 28 * 16 * widths == 18_464_768
    assert size.parameters == 1_543_714_304 + 18_464_768


@pytest.mark.parametrize(
    ("sharding", "weights", "reference", "gradients", "optimizer"),
    [  # GB, P = 7.6156e9
        ("none", 30.46, 30.46, 30.46, 60.92),  # 4 P, 4 P, 4 P, 8 P
        ("ddp", 30.46, 30.46, 60.92, 60.92),  # gradients once more in buckets
        ("fsdp", 7.62, 7.62, 7.62, 15.23),  # each over 4
        ("zero1", 15.23, 15.23, 30.46, 22.85),  # 2 P, 2 P, 4 P, 12 P / 4
        ("zero2", 15.23, 15.23, 11.42, 22.85),  # 2 P, 2 P, 6 P / 4, 12 P / 4
        ("zero3", 3.81, 3.81, 7.62, 22.85),  # 2 P / 4, 2 P / 4, 4 P / 4, 12 P / 4
    ],
)
def test_model_states_match_hand_computation(
    qwen_7b, sharding, weights, reference, gradients, optimizer
):
    given = setting(sharding=sharding, reference=True)
    functions = (weight_bytes, reference_bytes, gradient_bytes, optimizer_bytes)
    values = [round(function(qwen_7b, given) / 1e9, 2) for function in functions]
    assert values == [weights, reference, gradients, optimizer]


def test_zero_states_match_deepspeeds_own_estimators(qwen_7b):
    # estimate_zero2: 2 P + 18 P / n; estimate_zero3: 18 P / n beside the largest layer
    functions = (weight_bytes, gradient_bytes, optimizer_bytes)
    for sharding, expected in (("zero2", (2 + 18 / 4)), ("zero3", 18 / 4)):
        total = sum(function(qwen_7b, setting(sharding=sharding)) for function in functions)
        assert total == pytest.approx(expected * 7_615_616_512)


def test_offloaded_states_are_not_on_the_gpu(qwen_7b):
    given = setting(sharding="zero3", offload_optimizer=True)
    assert optimizer_bytes(qwen_7b, given) == gradient_bytes(qwen_7b, given) == 0
    assert weight_bytes(qwen_7b, given._replace(offload_weights=True)) == 0


def test_quantized_weights_match_hand_computation():
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    size = measure_model(known_config("Qwen/Qwen2.5-1.5B-Instruct"), lora)
    # linear weights of a layer: q and o 1536 x 1536, k and v 1536 x 256, three of 1536 x 8960
    linear = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)
    assert size.quantizable == linear
    rest = 1_543_714_304 - linear
    expected = linear * 0.5625 + rest * 2 + 18_464_768 * 2
    given = setting(weight_bytes=2, adapter=True, bits=4)
    assert weight_bytes(size, given) == pytest.approx(expected)
    assert engine_weight_bytes(size, given) == pytest.approx(linear * 0.5625 + rest * 2)


def test_copies_of_parameters_match_hand_computation(qwen_7b):
    parameters, matrix, layer = 7_615_616_512, 152064 * 3584, 233_057_792
    assert qwen_7b.largest_layer == layer
    assert working_bytes(qwen_7b, setting(sharding="ddp")) == 2 * parameters  # autocast's casts
    assert working_bytes(qwen_7b, setting(sharding="ddp", weight_bytes=2)) == 0
    assert working_bytes(qwen_7b, setting(sharding="fsdp")) == 2 * (2 * layer + 2 * matrix)
    assert working_bytes(qwen_7b, setting(sharding="zero2")) == 2 * 500_000_000
    assert working_bytes(qwen_7b, setting(sharding="zero3")) == 2 * (500_000_000 + 1_000_000_000)


def count_saved_bytes(config, dtype, autocast: bool, batch: int, length: int) -> int:
    """What autograd keeps of a forward pass, parameters and their casts left out."""
    model = AutoModelForCausalLM.from_config(config).to(dtype).train().model
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim == 2}
    shapes |= {shape[::-1] for shape in shapes}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tuple(tensor.shape) not in shapes:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive: its address stays taken
        return tensor

    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :3] = 0  # padding on the left, as prompts have it
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model(input_ids=torch.ones_like(mask), attention_mask=mask, use_cache=False)
    return sum(num_bytes for num_bytes, _ in kept.values())


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, False), (torch.float32, True), (torch.float32, False)],
)
def test_activations_of_a_layer_are_what_autograd_keeps(dtype, autocast):
    batch, length = 2, 56
    configs = [
        Qwen2Config(
            vocab_size=64,
            hidden_size=96,
            intermediate_size=320,
            num_hidden_layers=layers,
            num_attention_heads=6,
            num_key_value_heads=2,
        )
        for layers in (2, 3)
    ]
    fewer, more = (count_saved_bytes(config, dtype, autocast, batch, length) for config in configs)
    given = setting(
        weight_bytes=dtype.itemsize,
        compute_bytes=2 if autocast else dtype.itemsize,
        micro_batch=batch,
        prompt_length=16,
        completion_length=40,
    )
    estimate = layer_bytes_per_token(measure_model(configs[0]), given) * batch * length
    assert estimate == more - fewer


def test_activations_of_the_7b_recipe_match_hand_computation(qwen_7b):
    given = setting(sharding="zero3")
    tokens, hidden, mlp, queries = 8 * 4496, 3584, 18944, 3584
    layer = 16 * hidden + 2 * (4 * mlp + 4 * queries) + 4 * 28 + 8 + 2 * 4496
    in_flight = 2 * 2 * (mlp + hidden)
    expected = tokens * (28 * hidden * 2 + layer + 6 * hidden + in_flight)
    assert activation_bytes(qwen_7b, given) == expected
    assert expected / 1e9 == pytest.approx(20.1, abs=0.05)
    without = tokens * (28 * layer + 6 * hidden + in_flight)
    assert activation_bytes(qwen_7b, given._replace(checkpointing=False)) == without


def test_the_head_needs_tiles_and_its_gradient_but_no_logits(qwen_7b):
    scored, logits = 8 * 4096, 8 * 4096 * 152064 * 4
    expected = 4096 * 32768 * 2 + scored * 3584 * (2 + 4) + 4 * 152064 * 3584
    assert head_bytes(qwen_7b, setting(sharding="zero3")) == expected < logits / 5


def test_the_key_value_cache_matches_hand_computation(qwen_7b):
    per_token = 2 * 28 * 4 * 128 * 2  # keys and values, layers, heads, head_dim, bytes
    assert kv_bytes_per_token(qwen_7b) == per_token == 57_344
    engine = Engine(share=24e9, sleeps=True, tensor_parallel=1, length=4608)
    room = 24e9 - 2 * 7_615_616_512 - 1.5e9
    assert engine_sequences(qwen_7b, setting(), engine) == pytest.approx(room / 57_344 / 4608)
    halves = engine_sequences(qwen_7b, setting(), engine._replace(tensor_parallel=2))
    assert halves == pytest.approx((24e9 - 7_615_616_512 - 1.5e9) / (57_344 / 2) / 4608)


def test_checkpoints_match_hand_computation(qwen_7b):
    parameters = 7_615_616_512
    for sharding, per_parameter in (("ddp", 12), ("fsdp", 12), ("zero2", 16), ("zero3", 16)):
        given = setting(sharding=sharding)
        assert checkpoint_bytes(qwen_7b, given) == per_parameter * parameters
    assert checkpoint_bytes(qwen_7b, setting(sharding="zero3"), True) == 2 * parameters


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"save_strategy": "no"}, 0),
        ({"save_strategy": "steps", "save_steps": 20, "save_total_limit": 3}, 4),
        ({"save_strategy": "steps", "save_steps": 20}, 5),
        ({"save_strategy": "steps", "save_steps": 0.5, "save_total_limit": 3}, 2),
        ({"save_strategy": "epoch", "num_train_epochs": 2}, 2),
    ],
)
def test_checkpoints_on_the_disk_are_the_kept_ones_and_one_in_the_making(options, count, tmp_path):
    args = LoptiGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    assert count_checkpoints(args, optimizer_steps=100) == count


# Recipes and profiles


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders with the recipes' real sizes and our own tokenizer; no weights, no network."""
    root, folders = tmp_path_factory.mktemp("models"), {}
    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "assets" / "kk-tiny")
    for name in KNOWN_MODELS:
        folder = root / name.rsplit("/", maxsplit=1)[-1]
        known_config(name).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[name] = str(folder)
    return folders


@pytest.fixture
def diagnose(models, tmp_path):
    """Checks by name, on few puzzles: `diagnose("kk_qwen7b zero3 --beta 0")`.

    Rules on combinations can hold together; of one name the worst is kept.
    """

    def run(command: str, machine: Machine = LAPTOP) -> dict:
        recipe, *options = command.split()
        if options and not options[0].startswith("--"):
            options = ["--accelerate_config", *options]
        config = CONFIGS / f"{recipe}.yaml"
        name = yaml.safe_load(config.read_text())["model_name_or_path"]
        model = ["--model_name_or_path", models.get(name, name)]
        few = ["--num_people", "3", "--train_puzzles", "140", "--test_puzzles", "4"]
        if recipe.startswith("math"):  # theirs is on the hub
            problems = tmp_path / "problems.jsonl"
            problems.write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n' * 140)
            few += ["--dataset", str(problems)]
        few += ["--output_dir", str(tmp_path)]
        checks, _ = examine(["--config", str(config), *model, *few, *options], machine)
        return {check.name: check for check in sorted(checks, key=lambda c: c.status == FAIL)}

    return run


def failures(checks: dict) -> set[str]:
    return {name for name, check in checks.items() if check.status == FAIL}


# 7B fits only where everything is sharded, 3B not where nothing is
LARGE = ("kk_qwen7b", "math_dsr_qwen7b", "math_orz_qwen7b")
MEDIUM = ("kk_qwen3b", "kk_qwen3b_diw", "kk_qwen3b_reinforce_pp")
LAPTOP_RECIPES = ("kk_tiny_cpu", "kk_tiny_diw")
TOO_LARGE = {
    **{(name, place): {"memory"} for name in LARGE for place in ("single_gpu", "ddp", "zero2")},
    **{(name, place): {"memory"} for name in MEDIUM for place in ("single_gpu", "ddp")},
    **{
        (name, place): {"launch"}
        for name in LAPTOP_RECIPES
        for place in ("fsdp2", "zero2", "zero3")
    },
}
MEMORY_GB = {"kk_qwen1.5b_lora": "24"}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("recipe", sorted(path.stem for path in CONFIGS.glob("kk_*.yaml")))
def test_every_recipe_dry_runs_under_every_profile(diagnose, recipe, profile):
    checks = diagnose(f"{recipe} {profile} --gpu_memory_gb {MEMORY_GB.get(recipe, '80')}")
    assert failures(checks) == TOO_LARGE.get((recipe, profile), set())
    assert all(checks[name].fix for name in failures(checks))
    assert checks["machine"].status == (OK if recipe.startswith("kk_tiny") else WARN)
    assert {"data", "phases", "length", "model", "memory", "disk"} <= checks.keys()


def test_the_node_that_has_it_all_gets_no_warning(diagnose):
    checks = diagnose("kk_qwen7b zero3 --ar_alpha 0.3 --lopti_eta 0.5", NODE)
    assert {name for name, check in checks.items() if check.status != OK} <= {"disk"}
    assert "4 optimizer steps" in checks["phases"].found
    assert checks["update_ options"].found.startswith("on: trim, balance, skip, cut, project")
    assert "512 completions" in checks["batch"].found
    assert "vllm 0.30.0, deepspeed" in checks["packages"].found


def test_doctor_checks_for_processes_that_are_not_here(tmp_path):
    options = ["--config", "kk_qwen7b.yaml", "--output_dir", str(tmp_path)]
    _, args, _ = parse_for(options, num_processes=16, use_cpu=False)
    assert args.generation_batch_size == 16 * 8 * 16
    assert not args.use_cpu
    args = LoptiGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert args.world_size == 1  # the patch is gone


# What fails, and the fix it names


FAILURES = [  # command, machine, check, what is found, the fix
    (
        "kk_qwen7b zero3 --num_generations 24",
        *(LAPTOP, "batch", "no whole groups", "steps_per_generation to a multiple of 3, or"),
    ),
    (
        "kk_qwen7b zero3 --num_processes 6 --num_machines 4",
        *(LAPTOP, "launch", "not the same number on each of 4", "a multiple of num_machines"),
    ),
    ("kk_tiny_cpu fsdp2", LAPTOP, "launch", "separate copies", "Use single_gpu or ddp"),
    (
        "kk_qwen3b single_gpu --num_processes 4",
        *(LAPTOP, "launch", "silently starts one process", "Use ddp"),
    ),
    (
        "kk_qwen7b zero3 --num_processes 8",
        *(NODE, "machine", "4 GPUs of 80 GB for 8", "num_processes to 4"),
    ),
    (
        "kk_qwen1.5b_lora single_gpu",
        *(NODE, "machine", "nn.DataParallel", "CUDA_VISIBLE_DEVICES"),
    ),
    ("kk_tiny_cpu --fp16 true", LAPTOP, "precision", "fp16 needs a GPU", "to false"),
    ("kk_qwen7b zero3", NODE._replace(bf16=False), "precision", "no bf16", "fp16 to true"),
    (
        "kk_qwen7b zero3",
        *(NODE._replace(packages={}), "packages", "vllm missing", "pip install vllm deepspeed"),
    ),
    (
        "kk_qwen1.5b_lora fsdp2 --load_in_4bit true",
        *(LAPTOP, "together", "PEFT cannot merge", "Use ddp or single_gpu"),
    ),
    ("kk_qwen1.5b_lora ddp --load_in_8bit true", LAPTOP, "together", "no 8-bit", "load_in_4bit"),
    ("kk_qwen3b ddp --load_in_4bit true", LAPTOP, "together", "cannot train", "use_peft"),
    (
        "kk_qwen7b zero3 --ds3_gather_for_generation false",
        *(LAPTOP, "together", "ds3_gather_for_generation false with vLLM", "to true"),
    ),
    (
        "kk_qwen1.5b_lora ddp --sync_ref_model true",
        *(LAPTOP, "together", "without a reference model", "to false"),
    ),
    (
        "kk_qwen7b zero3 --vllm_max_model_length 4100",
        *(LAPTOP, "length", "vllm_max_model_length is 4100", "vllm_max_model_length to 4"),
    ),
    (
        "kk_qwen3b zero3 --max_completion_length 32768 --vllm_max_model_length 40000",
        *(LAPTOP, "length", "the model stops at 32768", "max_completion_length to 32"),
    ),
    (
        "kk_qwen7b zero3 --vllm_tensor_parallel_size 3",
        *(LAPTOP, "vLLM", "does not divide 4 processes", "a divisor of 4"),
    ),
    (
        "kk_qwen7b zero3 --vllm_gpu_memory_utilization 0.2",
        *(LAPTOP, "vLLM cache", "would not start", "Raise vllm_gpu_memory_utilization"),
    ),
    (
        "kk_qwen7b zero3 --per_device_train_batch_size 16",
        *(LAPTOP, "memory", "does not fit", "lower per_device_train_batch_size"),
    ),
    (
        "kk_qwen7b zero3 --vllm_enable_sleep_mode false",
        *(LAPTOP, "memory", "in the update", "vllm_enable_sleep_mode on"),
    ),
    (
        "kk_qwen7b zero3 --num_processes 64",
        *(LAPTOP, "data and model", "has 140 prompts, but one rollout batch takes 1024", ""),
    ),
    (
        "kk_qwen7b zero3 --dataset missing.parquet",
        *(LAPTOP, "data and model", "no such file: missing.parquet", ""),
    ),
    (
        "kk_qwen7b zero3 --model_name_or_path ./no_such",
        *(LAPTOP, "data and model", "no config.json. Give a model's folder or hub name", ""),
    ),
    ("kk_qwen7b zero3 --ar_alpha 2", LAPTOP, "recipe", "outside [0, 1]", ""),
    ("kk_qwen7b zero3 --ar_alpah 0.2", LAPTOP, "recipe", "--ar_alpah", ""),
    ("kk_qwen7b zero3 --config", LAPTOP, "recipe", "name of a YAML file", ""),
    (
        "kk_qwen7b zero3 --lopti_eta 0.5 --gradient_accumulation_steps 6",
        *(LAPTOP, "recipe", "Set steps_per_generation to 18", ""),
    ),
    ("kk_qwen7b no_such", LAPTOP, "recipe", "one of ddp, fsdp2, single_gpu, zero2, zero3", ""),
]


@pytest.mark.parametrize(("command", "machine", "name", "found", "fix"), FAILURES)
def test_a_failure_names_its_fix(diagnose, command, machine, name, found, fix):
    check = diagnose(command, machine)[name]
    assert check.status == FAIL
    assert found in check.found
    assert fix in check.fix


WARNINGS = [  # command, machine, check, what is found
    ("kk_qwen3b zero3 --use_vllm false", LAPTOP, "together", "gathers the whole model"),
    (
        "kk_qwen3b zero3 --use_vllm false --ds3_gather_for_generation false",
        *(LAPTOP, "together", "for every token"),
    ),
    ("kk_qwen3b fsdp2 --use_vllm false", LAPTOP, "together", "for every token"),
    ("kk_qwen1.5b_lora ddp --load_in_4bit true", LAPTOP, "together", "rounded to 4 bits"),
    ("kk_qwen1.5b_lora ddp --lora_dropout 0.05", LAPTOP, "together", "ratios to pi_old"),
    ("kk_qwen7b zero3 --bf16 false --fp16 true", NODE, "precision", "the profile says bf16"),
    ("kk_tiny_cpu single_gpu", LAPTOP, "precision", "the recipe no"),
    ("kk_tiny_cpu --bf16 true", LAPTOP, "precision", "slow on CPU"),
    ("kk_qwen7b zero3", LAPTOP, "packages", "vllm missing"),
    ("kk_qwen7b zero3", NODE._replace(vllm_complaint="too old"), "packages", "too old"),
    ("kk_qwen7b zero3 --gradient_accumulation_steps 6", LAPTOP, "phases", "span rollout"),
    (
        "kk_qwen7b zero3 --num_machines 4 --vllm_tensor_parallel_size 2",
        *(LAPTOP, "vLLM", "spans machines of 1"),
    ),
    (
        "kk_qwen7b zero3 --vllm_gpu_memory_utilization 0.23",
        *(LAPTOP, "vLLM cache", "generation will be slow"),
    ),
    ("kk_qwen7b zero3 --gpu_memory_gb 66", LAPTOP, "memory", "too close to call"),
]


@pytest.mark.parametrize(("command", "machine", "name", "found"), WARNINGS)
def test_what_works_badly_is_a_warning(diagnose, command, machine, name, found):
    check = diagnose(command, machine)[name]
    assert check.status == WARN
    assert found in check.found
    assert check.fix


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--ar_alpha 0.3 --loss_type grpo", "off: cut (loss_type=grpo divides by a row's number"),
        ("--ar_alpha 0.3 --update_trim false", "off: trim (set to false)"),
        ("", "on: none; off: trim, balance, skip, cut, project (no method is on)"),
    ],
)
def test_update_options_that_are_off_say_why(diagnose, options, found):
    assert found in diagnose(f"kk_qwen7b zero3 {options}")["update_ options"].found


def test_a_deepspeed_config_with_its_own_scheduler_is_a_warning(diagnose, tmp_path):
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": False},
        "scheduler": {"type": "WarmupLR"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    profile = find_profile("zero3").read_text().split("deepspeed_config:")[0]
    profile += f"deepspeed_config:\n  deepspeed_config_file: {tmp_path / 'ds.json'}\n"
    path = tmp_path / "profile.yaml"
    path.write_text(profile + "mixed_precision: bf16\nnum_processes: 4\n")
    checks = diagnose(f"kk_qwen7b {path} --lopti_eta 0.5")
    assert checks["schedule"].status == WARN
    assert "ticks on every engine step" in checks["schedule"].found
    assert checks["precision"].status == FAIL
    assert "the DeepSpeed config switches bf16 off" in checks["precision"].found
    peak = float(checks["memory"].found.split()[0])
    assert peak < 40  # 30 of 64 GB, gradients and optimizer, are offloaded


def test_an_unknown_key_in_a_profile_fails(diagnose, tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(find_profile("ddp").read_text() + "num_procesess: 4\n")
    assert "num_procesess" in diagnose(f"kk_qwen7b {path}")["recipe"].found


# The vLLM server


@pytest.fixture
def serve():
    """A server that answers as `vllm serve` does: `url = serve({"/health": "", ...})`."""
    servers = []

    def start(pages: dict) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                page = pages.get(self.path.split("?")[0])
                self.send_response(404 if page is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(page).encode())

            def log_message(self, *args):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


PAGES = {
    "/health": "",
    "/v1/models": {"data": [{"id": "qwen", "max_model_len": 4608}]},
    "/server_info": {
        "vllm_config": {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
    },
}


@pytest.mark.parametrize(
    ("changes", "status", "found", "fix"),
    [
        ({}, OK, "serves qwen, sequences of 4608 tokens", ""),
        ({"/health": None}, FAIL, "does not answer", "VLLM_SERVER_DEV_MODE=1 vllm serve"),
        ({"/server_info": None}, FAIL, "takes no new weights", "VLLM_SERVER_DEV_MODE=1"),
        (
            {"/server_info": {"vllm_config": {"weight_transfer_config": None}}},
            *(FAIL, "takes no new weights", "--weight-transfer-config"),
        ),
        (
            {"/v1/models": {"data": [{"id": "qwen", "max_model_len": 2048}]}},
            *(FAIL, "prompt and completion take 4", "--max-model-len 4"),
        ),
    ],
)
def test_the_server_is_asked(diagnose, serve, changes, status, found, fix):
    url = serve({**PAGES, **changes})
    command = f"kk_qwen7b zero3 --vllm_mode server --vllm_server_base_url {url}"
    check = diagnose(command)["vLLM server"]
    assert check.status == status
    assert found in check.found
    assert fix in check.fix


def test_a_server_that_is_down_fails(diagnose):
    server = "--vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 9"
    checks = diagnose(f"kk_qwen7b zero3 {server}")
    assert failures(checks) == {"vLLM server"}
    assert "http://127.0.0.1:9 does not answer" in checks["vLLM server"].found
    assert "vllm serve" in checks["vLLM server"].fix


# The hub is not reached


def test_without_a_hub_the_recipes_models_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    few = ["--train_puzzles", "80", "--output_dir", str(tmp_path)]
    args = ["--config", "kk_qwen7b.yaml", "--accelerate_config", "zero3", *few]
    checks, rows = examine(args, LAPTOP)
    found = {check.name: check for check in checks}
    assert "7,615,616,512 parameters (known to doctor" in found["model"].found
    assert found["data"].status == WARN
    assert rows

    checks, rows = examine([*args, "--model_name_or_path", "no/such"], LAPTOP)
    found = {check.name: check for check in checks}
    assert found["model"].status == WARN
    assert "config.json" in found["model"].fix
    assert not rows


# The command


def test_the_exit_code_is_0_if_nothing_failed(tmp_path, capsys):
    options = ["--config", "kk_tiny_cpu.yaml", "--output_dir", str(tmp_path)]
    assert doctor.main(options) == 0
    out = capsys.readouterr().out
    assert "0 failed" in out
    assert "activations" in out


def test_the_exit_code_is_1_if_something_failed(tmp_path):
    command = "from lopti_trl.cli import main; main()"
    options = ["--config", "kk_tiny_cpu.yaml", "--accelerate_config", "zero3"]
    run = subprocess.run(
        [sys.executable, "-c", command, "doctor", *options, "--num_generations", "7"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert run.returncode == 1, run.stderr
    assert "FAIL" in run.stdout
    assert "Set steps_per_generation to a multiple of 7" in run.stdout


def test_the_table_shows_every_check(diagnose, capsys):
    checks = diagnose("kk_qwen7b zero3 --vllm_tensor_parallel_size 3")
    doctor.render(list(checks.values()), [], Console(width=200))
    out = capsys.readouterr().out
    assert all(check.found[:40] in out for check in checks.values())
    assert "divisor of 4" in out


# The Slurm script


def test_the_slurm_script_is_clean_bash():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.defpath}")
    if shellcheck:
        subprocess.run([shellcheck, "--shell=bash", str(SCRIPT)], check=True)


@pytest.fixture
def submit(tmp_path):
    """Run the script as Slurm would on two nodes of four GPUs, the programs it starts faked."""
    fakes = {
        "scontrol": 'printf "node1\\nnode2\\n"',
        "srun": f"""echo "srun $*" >> {tmp_path}/calls
            [[ $* != *"vllm serve"* ]] || exec /bin/sleep 60""",
        "lopti-trl": f'echo "lopti-trl $*" >> {tmp_path}/calls',
        "curl": "exit 0",
        "sleep": "exec /bin/sleep 0.1",
    }
    folder = tmp_path / "bin"
    folder.mkdir()

    def run(*options: str, **changes: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        for name, body in {**fakes, **changes}.items():
            path = folder / name
            path.write_text(f"#!/bin/bash\n{body}\n")
            path.chmod(0o755)
        job = {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_ID": "12345",
            "SLURM_GPUS_ON_NODE": "4",
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", str(SCRIPT), *options], env=job, capture_output=True, text=True, timeout=20
        )
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_slurm_trains_on_all_nodes_after_doctor(submit):
    done, calls = submit("--config", "kk_qwen7b.yaml", "--", "--ar_alpha", "0.3")
    assert done.returncode == 0, done.stderr
    check, train = calls
    recipe = "--config kk_qwen7b.yaml --resume_from_checkpoint auto --ar_alpha 0.3"
    profile = "configs/accelerate/zero3.yaml"
    assert check == (
        f"lopti-trl doctor --accelerate_config {profile} --num_processes 8 --num_machines 2 "
        f"{recipe}"
    )
    assert "--nodes=2 --ntasks=2 --nodelist=node1,node2" in train
    assert train.endswith(
        f"launch --config_file {profile} --num_processes 8 --num_machines 2 --main_process_ip "
        f"node1 --main_process_port 22345 scripts/train.py {recipe}"
    )


def test_slurm_serves_vllm_on_the_last_node_and_stops_it(submit):
    done, calls = submit("--config", "kk_qwen7b.yaml", "--accelerate", "fsdp2", "--vllm")
    assert done.returncode == 0, done.stderr  # within the time-out, so the server was stopped
    [server] = [call for call in calls if "vllm serve" in call]  # on the way while doctor checks
    check, train = (call for call in calls if call != server)
    assert "--nodelist=node2" in server
    assert "vllm serve Qwen/Qwen2.5-7B-Instruct-1M" in server
    assert server.endswith("--max-model-len 4608 --seed 42")
    assert "--num_processes 4 --num_machines 1" in check
    assert "--nodelist=node1 " in train
    assert train.endswith("--vllm_mode server --vllm_server_base_url http://node2:8000")


def test_slurm_does_not_train_if_doctor_or_the_server_fails(submit):
    done, calls = submit("--config", "kk_qwen7b.yaml", **{"lopti-trl": "exit 1"})
    assert (done.returncode, calls) == (1, [])
    done, calls = submit("--config", "kk_qwen7b.yaml", "--vllm", srun="exit 1", curl="exit 1")
    assert (done.returncode, calls) == (1, [])
    assert "vLLM stopped: see slurm-vllm-12345.log" in done.stderr


def test_slurm_lets_the_trainer_save_itself_when_the_server_dies(submit):
    srun = 'case "$*" in *"vllm serve"*) exit 1 ;; esac; /bin/sleep 1; exit 9'
    done, _ = submit("--config", "kk_qwen7b.yaml", "--vllm", srun=srun)
    assert done.returncode == 9


def test_slurm_passes_on_a_failed_training_and_requeues_in_time(submit, tmp_path):
    done, _ = submit("--config", "kk_qwen7b.yaml", srun="exit 7")
    assert done.returncode == 7
    scontrol = f'echo "$*" >> {tmp_path}/control; printf "node1\\n"'
    done, _ = submit(
        "--config", "kk_qwen7b.yaml", scontrol=scontrol, srun="kill -USR1 $PPID; exec /bin/sleep 9"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "control").read_text().splitlines()[-1] == "requeue 12345"
