"""Levels 2 to 5: mathematics as a training task, from the recipe to the metrics of a run."""

import functools
import json

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accelerate.utils import set_seed
from datasets import config as datasets_config
from rigged import make_rigged
from transformers import AutoTokenizer

from lopti_trl.checks import OK, WARN, Machine
from lopti_trl.doctor import examine, measure_prompts
from lopti_trl.evaluation import accuracy, evaluate_trainer, math_task, read_samples
from lopti_trl.tasks.math import INSTRUCTION
from lopti_trl.train import (
    CONFIGS,
    PACKAGE,
    TaskArguments,
    build_trainer,
    load_datasets,
    main,
    parse_args,
)

pytest.importorskip("math_verify")

RECIPES = ("math_dsr_qwen7b", "math_orz_qwen7b")


@pytest.fixture
def problems(tmp_path) -> str:
    """A parquet file of 24 sums in the format of verl, as DSR-Uniform is published."""
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {i} + 1?{' Hm.' * (i % 3)}"}],
            "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
        }
        for i in range(24)
    ]
    path = tmp_path / "sums.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_have_the_papers_values(recipe, tmp_path):
    options = ["--config", f"{recipe}.yaml", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    task, args, model = parse_args(options)
    assert model.model_name_or_path == "Qwen/Qwen2.5-7B"
    assert (task.task, task.prompt_style, task.max_prompt_tokens) == ("math", "base", 1024)
    assert task.dataset == {"math_dsr_qwen7b": "deepscaler", "math_orz_qwen7b": "orz57k"}[recipe]
    assert (args.temperature, args.max_completion_length, args.num_generations) == (1.0, 4096, 8)
    world_size = 4
    assert args.gradient_accumulation_steps * args.per_device_train_batch_size * world_size == 256
    assert args.steps_per_generation * args.per_device_train_batch_size * world_size == 512
    published = {"epsilon": 0.2, "epsilon_high": 0.24, "delta": 10.0, "learning_rate": 1e-6}
    assert {name: getattr(args, name) for name in published} == published
    _, args, _ = parse_args([*options, "--ar_alpha", "0.1", "--lopti_eta", "0.5"])
    assert (args.ar_alpha, args.lopti_eta) == (0.1, 0.5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_doctor_examines_the_recipes_with_and_without_the_hub(recipe, problems, monkeypatch):
    node = Machine(
        [80.0] * 4, True, 500.0, {"vllm": "0.30.0", "deepspeed": "0.19.8", "math-verify": "0.9"}
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", True)
    args = ["--config", f"{recipe}.yaml", "--accelerate_config", "zero3"]
    checks, _ = examine(args, node)
    found = {check.name: check for check in checks}
    count = {"math_dsr_qwen7b": "10,000", "math_orz_qwen7b": "57,000"}[recipe]
    assert found["data"].status == WARN
    assert f"{count} prompts of up to 1024 tokens" in found["data"].found
    assert found["length"].found == "prompt 1024 + completion 4096 = 5120 tokens"
    assert "7,615,616,512 parameters" in found["model"].found
    assert found["memory"].status == OK
    assert "math-verify 0.9" in found["packages"].found
    checks, _ = examine(args, node._replace(packages={"vllm": "0.30.0", "deepspeed": "0.19.8"}))
    found = {check.name: check for check in checks}
    assert "pip install math-verify" in found["packages"].fix
    local = TaskArguments(task="math", dataset=problems)
    lengths, estimated = measure_prompts(local, AutoTokenizer.from_pretrained(tiny_model()))
    assert (len(lengths), estimated) == (24, "")
    with pytest.raises(ConnectionError):  # of an unknown size: an error, not a guess
        measure_prompts(TaskArguments(task="math", dataset="orz57k"), None)


def tiny_model() -> str:
    return str(PACKAGE / "assets" / "kk-tiny")


def test_prompts_come_in_the_papers_two_styles_and_long_ones_are_left_out(problems):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    task = TaskArguments(task="math", dataset=problems)
    rows, held_out = load_datasets(task, tokenizer)
    assert held_out is None
    assert rows[0] == {"prompt": "What is 0 + 1?" + INSTRUCTION, "answer": "1", "source": "sums"}
    chat = TaskArguments(task="math", dataset=problems, prompt_style="chat")
    assert load_datasets(chat, tokenizer)[0]["prompt"][0] == (
        f"<|im_start|>user\nWhat is 0 + 1?{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    lengths = [len(ids) for ids in tokenizer(list(rows["prompt"]))["input_ids"]]
    limit = sorted(lengths)[11]
    task.max_prompt_tokens = limit
    kept = load_datasets(task, tokenizer)[0]["answer"]
    assert kept == [a for a, n in zip(rows["answer"], lengths, strict=True) if n <= limit]
    assert 12 <= len(kept) < 24
    task.max_prompt_tokens, task.train_problems = None, 5
    assert len(load_datasets(task, tokenizer)[0]) == 5


def test_the_tiny_model_trains_two_steps_on_a_parquet_of_problems(problems, tmp_path):
    output = tmp_path / "run"
    data = ["--task", "math", "--dataset", problems, "--prompt_style", "chat"]
    held_out = [
        "--eval_tasks",
        f"sums={problems}",
        f"more={problems}",
        "--eval_every_rollouts",
        "1",
    ]
    metrics = ["--eval_metrics", "greedy", "pass@2", "--eval_average", "2"]
    size = ["--max_steps", "2", "--max_completion_length", "12", "--disable_tqdm", "true"]
    size += ["--gradient_accumulation_steps", "1", "--steps_per_generation", "1"]
    size += ["--lopti_eta", "none"]
    base = ["--config", "kk_tiny_cpu.yaml", "--output_dir", str(output)]
    results = main(*parse_args([*base, *data, *held_out, *metrics, *size]))
    assert set(results["evaluation"]) == {"before", "after", "mean of last 2"}
    for moment in results["evaluation"].values():
        assert set(moment) == {"greedy", "pass@2"}
        assert all(set(columns) == {"sums", "more", "average"} for columns in moment.values())
    log = [row for row in results["log"] if "loss" in row]
    assert [row["step"] for row in log] == [1, 2]
    assert all({"math/boxed", "math/correct", "math/late"} <= row.keys() for row in log)
    assert [row["math/gold_unparseable"] for row in log] == [0, 0]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if "eval_pass@2/sums" in row] == [1, 2]
    for name in ("before", "step-1", "step-2"):  # step-2 is also the evaluation after training
        samples = read_samples(output / "evaluation" / name / "sums" / "sampled")
        keys = sorted((s["prompt"], s["sample"]) for s in samples)
        assert keys == [(p, s) for p in range(24) for s in range(2)]
        assert "| sums | 24 |" in (output / "evaluation" / name / "results.md").read_text()
    assert not (output / "evaluation" / "after").exists()


@pytest.mark.parametrize("method", [{}, {"ar_alpha": 0.1, "lopti_eta": 0.5}])
def test_a_model_that_is_sometimes_right_learns_to_be(method, tmp_path):
    """The rigged model answers 1 with a chance of 0.3, and only its head can change that."""
    network, tokenizer = make_rigged()
    network.save_pretrained(tmp_path / "model")
    rows = [{"problem": f"q{i % 7} q{i % 3}", "answer": "1"} for i in range(32)]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = ["--task", "math", "--dataset", str(path), "--output_dir", str(tmp_path / "run")]
    options = {
        "model_name_or_path": tmp_path / "model",
        "learning_rate": 0.1,
        "max_steps": 16 if method else 8,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_generations": 8,
        "max_completion_length": 4,
        "logging_steps": 1,
        "disable_tqdm": True,
        "beta": 0.0,
        "ar_alpha": 0,
        "lopti_eta": "none",
        **method,
    }
    flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    task, args, model = parse_args(["--config", "kk_tiny_cpu.yaml", *data, *flags])
    set_seed(0)
    trainer = build_trainer(task, args, model, tokenizer, load_datasets(task, tokenizer)[0])
    evaluate = functools.partial(
        evaluate_trainer, trainer, [math_task(trainer.train_dataset, "ones")], ["sampled", "avg@4"]
    )
    before = accuracy(evaluate())["avg@4"]["ones"]
    trainer.train()
    after = accuracy(evaluate())["avg@4"]["ones"]
    assert before == pytest.approx(0.3, abs=0.1)
    assert after > 0.9
    log = [row for row in trainer.state.log_history if "math/correct" in row]
    assert log[0]["math/correct"] == pytest.approx(0.3, abs=0.2)
    assert log[-1]["reward"] == pytest.approx(log[-1]["math/correct"])  # 1 if right, else 0


def test_wrong_task_arguments_say_what_to_do():
    for changes, message in (
        ({"task": "math"}, r"dataset=generated has no maths problems. Set dataset .*deepscaler"),
        ({"eval_metrics": ["best@3"]}, "metric 'best@3' is unknown"),
        ({"eval_every_rollouts": 0}, "eval_every_rollouts=0 leaves nothing"),
        ({"eval_average": 0}, "eval_average=0 leaves nothing to evaluate. Use 1"),
    ):
        with pytest.raises(ValueError, match=message):
            TaskArguments(**changes)
    assert (CONFIGS / "eval" / "math.yaml").is_file()
