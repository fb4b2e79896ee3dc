"""Level 5: recipes, command line and the whole laptop run."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lopti_trl.tasks import kk
from lopti_trl.train import CONFIGS, PACKAGE, Plan, find_config, main, parse_args

ROOT = PACKAGE.parent
RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
METHODS = [
    [],
    ["--ar_alpha", "0", "--lopti_eta", "none"],
    ["--ar_alpha", "0.3", "--lopti_eta", "none"],
    ["--ar_alpha", "0", "--lopti_eta", "0.5"],
    ["--ar_alpha", "0.3", "--lopti_eta", "0.5"],
    ["--ar_alpha", "0", "--lopti_eta", "none", "--num_iterations", "2"],
    ["--lopti_eta", "none", "--lopti_quantile", "0.4"],
    ["--lopti_eta", "0.5", "--lopti_order", "high_first"],
    ["--lopti_eta", "0.5", "--lopti_schedule", "minibatch"],
    ["--prob_band", "0", "0.25"],
    ["--reward_mode", "lenient"],
    ["--report_to", "trackio"],
]


@pytest.mark.parametrize(("recipe", "flags"), list(itertools.product(RECIPES, METHODS)))
def test_every_recipe_parses_with_every_documented_flag(recipe, flags, tmp_path):
    # bf16 of the GPU recipes is refused on a machine without a GPU unless it trains on CPU
    options = ["--config", recipe, "--use_cpu", "true", "--output_dir", str(tmp_path), *flags]
    _, args, _ = parse_args(options)
    if "--ar_alpha" in flags:
        assert args.ar_alpha == float(flags[flags.index("--ar_alpha") + 1])
    if "--lopti_eta" in flags:
        eta = flags[flags.index("--lopti_eta") + 1]
        assert args.lopti_eta == (None if eta == "none" else float(eta))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_flag_in_a_recipes_header_parses(recipe, tmp_path):
    header = (CONFIGS / recipe).read_text().split("\n# Model\n")[0]
    lines = [line.split(" # ")[0] for line in header.splitlines() if "--" in line]
    flags = [re.findall(r"--(?!config)\S+ [^-\s]\S*", line) for line in lines]
    assert sum(map(len, flags)) >= 4  # the methods are documented
    for line in flags:
        options = [word for flag in line for word in flag.split()]
        parse_args(
            ["--config", recipe, "--use_cpu", "true", *options, "--output_dir", str(tmp_path)]
        )


def test_gpu_recipes_have_the_published_hyper_parameters(tmp_path):
    for recipe in ("kk_qwen7b.yaml", "kk_qwen3b.yaml"):
        _, args, _ = parse_args(
            ["--config", recipe, "--use_cpu", "1", "--output_dir", str(tmp_path)]
        )
        world_size = 4
        assert args.per_device_train_batch_size * world_size == 32
        assert args.gradient_accumulation_steps * 32 == 256
        assert args.steps_per_generation * 32 == 512
        published = {
            "num_generations": 8,
            "temperature": 0.7,
            "max_completion_length": 4096,
            "epsilon": 0.2,
            "epsilon_high": 0.24,
            "delta": 10.0,
            "beta": 0.001,
            "learning_rate": 1e-6,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "num_train_epochs": 5,
            "use_bias_correction_kl": False,
            "vllm_importance_sampling_correction": False,
        }
        assert {name: getattr(args, name) for name in published} == published
        assert args.lr_scheduler_type == "constant"


def test_the_command_line_beats_the_yaml_and_the_yaml_beats_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "ar_alpha: 0.2\nlopti_eta: 0.4\nlearning_rate: 1e-5\nuse_cpu: true\nbf16: false"
    )
    task, args, _ = parse_args(["--config", str(path), "--ar_alpha", "0.1"])
    assert (args.ar_alpha, args.lopti_eta, args.learning_rate) == (0.1, 0.4, 1e-5)
    assert task.num_people == [3, 4, 5, 6, 7]


def test_a_typo_fails_in_the_yaml_and_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("lopti_etta: 0.4\nuse_cpu: true\nbf16: false")
    with pytest.raises(ValueError, match="lopti_etta"):
        parse_args(["--config", str(path)])
    with pytest.raises(ValueError, match="lopti_etta"):
        parse_args(["--use_cpu", "true", "--lopti_etta", "0.4"])


def test_a_bare_config_name_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("kk_tiny_cpu.yaml") == CONFIGS / "kk_tiny_cpu.yaml"
    (tmp_path / "kk_tiny_cpu.yaml").touch()
    assert find_config("kk_tiny_cpu.yaml").resolve() == tmp_path / "kk_tiny_cpu.yaml"


def test_a_missing_config_names_the_ones_there_are():
    with pytest.raises(FileNotFoundError, match=r"no_such.yaml.*kk_qwen7b.yaml, kk_tiny_cpu.yaml"):
        parse_args(["--config", "no_such.yaml"])
    with pytest.raises(ValueError, match="--config needs the name"):
        parse_args(["--config"])


@pytest.fixture
def tiny_run(tmp_path):
    """Train the laptop recipe in `tmp_path` with some options changed: a few seconds."""

    def run(*options: str) -> dict:
        small = ["--max_completion_length", "16", "--train_puzzles", "16", "--test_puzzles", "4"]
        base = ["--config", "kk_tiny_cpu.yaml", "--output_dir", str(tmp_path / "run")]
        return main(*parse_args([*base, *small, "--disable_tqdm", "true", *options]))

    return run


def test_the_run_writes_metrics_model_card_and_curve(tiny_run, tmp_path):
    results = tiny_run("--max_steps", "8")
    output = tmp_path / "run"
    assert json.loads((output / "metrics.json").read_text()) == json.loads(json.dumps(results))
    # as given, not this machine's path of what ships with the package
    assert results["config"]["model_name_or_path"] == "kk-tiny"
    assert set(results["evaluation"]) == {"before", "after"}
    for moment in results["evaluation"].values():
        assert set(moment) == {"greedy", "sampled"}
        for accuracy in moment.values():
            assert set(accuracy) == {"2", "3", "average"}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert {"kk/format_ok", "kk/parsed", "kk/correct"} <= lines[0].keys()
    assert (output / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    card = (output / "README.md").read_text()
    assert "2505.12929" in card
    assert "Do Not Let Low-Probability Tokens Over-Dominate" in card
    AutoModelForCausalLM.from_pretrained(output)
    assert AutoTokenizer.from_pretrained(output).eos_token == "<|im_end|>"


def test_auto_resume_goes_on_where_the_run_stopped_and_repeats_no_row(tiny_run, tmp_path):
    saving = ["--save_strategy", "steps", "--save_steps", "3", "--resume_from_checkpoint", "auto"]
    first = tiny_run(*saving, "--max_steps", "4")  # nothing to resume from yet
    resumed = tiny_run(*saving, "--max_steps", "8")
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert resumed["evaluation"]["before"] == first["evaluation"]["before"]
    steps = [row["step"] for row in resumed["log"] if "loss" in row]
    assert steps == list(range(1, 9))


def test_the_plan_says_what_the_run_then_does(tiny_run):
    results = tiny_run("--num_iterations", "2")
    plan = results["plan"]
    last = [row for row in results["log"] if "loss" in row][-1]
    assert plan["optimizer_steps"] == last["step"]
    assert plan["rollout_batches"] == last["rollout_batches"]
    assert plan["completions_per_rollout_batch"] == 64
    assert plan["method"] == "GRPO + AR (alpha 0.3) + Lopti (eta 0.5, low_first, batch)"


def test_the_plan_counts_steps_by_hand():
    _, args, _ = parse_args(
        ["--config", "kk_qwen7b.yaml", "--use_cpu", "true", "--lopti_eta", "0.5"]
    )
    plan = Plan.of(args, prompt_lengths=[300, 350] * 2250)
    # one process here: 8 x 16 = 128 completions of 8 a prompt; the paper's four processes give 512
    assert plan.completions_per_rollout_batch == 128
    assert plan.prompts_per_rollout_batch == 16
    assert plan.optimizer_steps_per_rollout_batch == 4  # low, low, high, high
    assert plan.rollout_batches == 5 * 281
    assert plan.optimizer_steps == 5 * 281 * 4
    assert plan.max_tokens_per_micro_batch == 8 * (350 + 4096)


def test_too_few_prompts_for_one_rollout_batch_is_an_error_before_the_model_loads(tiny_run):
    with pytest.raises(ValueError, match=r"has 6 prompts, but one rollout batch takes 8 .*Add"):
        tiny_run("--train_puzzles", "3")


def test_bad_data_stops_the_run_with_the_row_or_the_file(tiny_run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: missing\.parquet"):
        tiny_run("--dataset", "missing.parquet")
    rows = list(kk.generate_puzzles(3, 12, seed=0))
    path = tmp_path / "puzzles.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="empty"):
        tiny_run("--dataset", str(path))
    rows[4]["solution"] = None
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(ValueError, match="row 4, column 'solution'"):
        tiny_run("--dataset", str(path))


def test_the_official_file_trains_as_it_is(tiny_run):
    path = ROOT.parent / "shared" / "data" / "kk" / "train.parquet"
    if not path.exists():
        pytest.skip("the official files are not here")
    options = ["--dataset", str(path), "--num_people", "3", "--max_completion_length", "4"]
    results = tiny_run(*options, "--max_steps", "2", "--test_puzzles", "0")
    assert results["plan"]["prompts_per_rollout_batch"] == 8
    assert results["evaluation"] == {}


def test_the_tiny_model_and_its_tokenizer_survive_auto_classes():
    path = PACKAGE / "assets" / "kk-tiny"
    assert sum(file.stat().st_size for file in path.iterdir()) < 4_000_000
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.model_type == "qwen2"
    assert model.num_parameters() < 1_000_000
    tokenizer = AutoTokenizer.from_pretrained(path)
    quiz = kk.generate_puzzles(3, 1, seed=0)["quiz"][0]
    text = kk.build_prompt(quiz, tokenizer) + " Let me check.</think>\n<answer>(1) Zoey is a knave"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) < 150  # words are tokens, not letters
    assert tokenizer.decode(tokenizer("Gruß, 你好!")["input_ids"]) == "Gruß, 你好!"


@pytest.mark.parametrize(
    ("folder", "script"),
    [
        pytest.param(ROOT, "scripts/train.py", marks=pytest.mark.slow),
        (ROOT / "scripts", "train.py"),
    ],
)
def test_the_script_starts_from_the_root_and_from_scripts(folder, script):
    run = subprocess.run(
        [sys.executable, script, "--config", "kk_tiny_cpu.yaml", "--ar_alpha", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode != 0
    assert "ar_alpha=2.0 is outside [0, 1]" in run.stderr


def test_accelerate_profiles_name_their_back_end():
    profiles = {
        path.stem: yaml.safe_load(path.read_text())
        for path in (CONFIGS / "accelerate").glob("*.yaml")
    }
    kinds = {name: profile["distributed_type"] for name, profile in profiles.items()}
    assert kinds == {
        "single_gpu": "NO",
        "ddp": "MULTI_GPU",
        "fsdp2": "FSDP",
        "zero2": "DEEPSPEED",
        "zero3": "DEEPSPEED",
    }
    assert profiles["fsdp2"]["fsdp_config"]["fsdp_version"] == 2
    assert profiles["zero3"]["deepspeed_config"]["zero_stage"] == 3
