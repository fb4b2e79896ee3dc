"""Level 5: the recipes of the tasks other than K&K, doctor on them, and two steps of each."""

import json
from pathlib import Path

import huggingface_hub.constants
import pandas as pd
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from sandboxed import need_sandbox
from test_dialogue import save_reward_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForSequenceClassification

from lopti_trl.checks import FAIL, Machine
from lopti_trl.doctor import examine
from lopti_trl.tasks.code import code_reward, load_problems
from lopti_trl.train import PACKAGE, ROW_TASKS, main, parse_args

DATA = Path(__file__).parent / "data"
SAMPLES = {"code": "mbpp.jsonl", "summarize": "articles.jsonl", "dialogue": "dialogues.jsonl"}
TINY = PACKAGE / "assets" / "kk-tiny"
PACKAGES = {"vllm": "0.30.0", "deepspeed": "0.19.8", "bitsandbytes": "0.50.0", "requests": "2"}
NODE = Machine(gpus=[80.0] * 4, bf16=True, ram=500.0, packages=PACKAGES)


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Recipes


def test_every_task_has_a_recipe():
    for task in ROW_TASKS:
        parsed, args, model = parse_args(["--config", f"{task}_qwen3b.yaml", "--use_cpu", "true"])
        assert parsed.task == task
        assert model.model_name_or_path == "Qwen/Qwen2.5-3B-Instruct"
        assert (args.num_generations, args.ar_alpha, args.lopti_eta) == (8, 0, None)
        assert args.output_dir == f"outputs/{task}_qwen3b"
        kk = parse_args(["--config", "kk_qwen3b.yaml", "--use_cpu", "true"])[1]
        assert (args.learning_rate, args.epsilon_high) == (kk.learning_rate, kk.epsilon_high)


@pytest.mark.parametrize("task", ROW_TASKS)
def test_doctor_passes_every_recipe(task, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    data = write_rows(tmp_path / "rows.jsonl", rows_of(SAMPLES[task]) * 16)  # one rollout batch
    options = ["--config", f"{task}_qwen3b.yaml", "--accelerate_config", "zero3"]
    options += ["--dataset", data, "--eval_dataset", data, "--output_dir", str(tmp_path)]
    options += ["--num_train_epochs", "1"]  # the disk of this machine is not the one to check
    checks, rows = examine(options, NODE)
    assert {check.name: check.found for check in checks if check.status == FAIL} == {}
    assert {"data", "phases", "length", "model", "memory"} <= {check.name for check in checks}
    assert rows

    checks, _ = examine([*options, "--dataset", "none.jsonl"], NODE)
    assert checks[-1].found.startswith("no such file: none.jsonl")


def test_the_prompt_limits_of_the_recipes_fit_their_engines():
    for task in ROW_TASKS:
        parsed, args, _ = parse_args(["--config", f"{task}_qwen3b.yaml", "--use_cpu", "true"])
        tokens = parsed.max_prompt_characters / 3 + 50  # doctor's upper estimate, and instructions
        assert tokens + args.max_completion_length <= args.vllm_max_model_length


# Two steps of each on the tiny model


def train(tmp_path: Path, *options: str) -> tuple[dict, pd.DataFrame]:
    """Metrics of the run, and the completions of its first step."""
    base = ["--config", "kk_tiny_cpu.yaml", "--output_dir", str(tmp_path / "run"), "--max_steps=2"]
    base += ["--disable_tqdm", "true", "--log_completions", "true", "--max_completion_length=24"]
    base += ["--gradient_accumulation_steps=1", "--steps_per_generation=1"]
    base += ["--per_device_eval_batch_size=8"]
    results = main(*parse_args([*base, *options]))
    first, *_ = sorted((tmp_path / "run" / "completions").glob("*.parquet"))
    return results, pd.read_parquet(first)


def texts_of(table: pd.DataFrame) -> list[str]:
    return [completion[-1]["content"] for completion in table["completion"]]


def check_run(tmp_path: Path, results: dict, table: pd.DataFrame, rewards: list[float]) -> None:
    """The logged rewards are these, and they moved the model."""
    losses = [row for row in results["log"] if "loss" in row]
    assert [row["step"] for row in losses] == [1, 2]
    assert len(set(rewards)) > 1
    assert losses[0]["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-4)
    assert losses[0]["grad_norm"] > 0
    before = AutoModelForCausalLM.from_pretrained(TINY).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert len(table) == len(rewards) == 16


def test_summaries_train_by_rouge(tmp_path):
    rows = rows_of("articles.jsonl")
    for index, row in enumerate(rows):
        row["highlights"] = f"It must be clear {index}."  # words of the tiny model
    data = write_rows(tmp_path / "rows.jsonl", rows)
    evaluate = ["--eval_dataset", data, "--test_rows=2", "--eval_strategy=steps", "--eval_steps=2"]
    results, table = train(tmp_path, "--task", "summarize", "--dataset", data, *evaluate)
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    references = {row["article"]: row["highlights"] for row in rows}
    articles = [prompt[-1]["content"].split("\n\n", 1)[1] for prompt in table["prompt"]]
    rewards = [
        scorer.score(references[article], text)["rougeL"].fmeasure
        for article, text in zip(articles, texts_of(table), strict=True)
    ]
    assert list(table["rouge_reward"]) == pytest.approx(rewards)
    check_run(tmp_path, results, table, rewards)
    assert results["evaluation"] == {}
    assert [row["step"] for row in results["log"] if "eval_reward" in row] == [2]


def test_dialogues_train_by_a_reward_model(tmp_path):
    reward_model = str(save_reward_model(tmp_path / "reward"))
    data = str(DATA / "dialogues.jsonl")
    options = ["--task", "dialogue", "--dataset", data, "--reward_model", reward_model]
    results, table = train(tmp_path, *options)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = Qwen2ForSequenceClassification.from_pretrained(reward_model)
    rewards = []
    for prompt, completion in zip(table["prompt"], table["completion"], strict=True):
        text = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        rewards.append(model(**ids).logits.item())
    assert list(table["reward"]) == pytest.approx(rewards, abs=1e-4)
    check_run(tmp_path, results, table, rewards)


def teach(folder: Path, prompt: list[dict], answers: list[str], steps: int = 150) -> str:
    """The tiny model, made to give these answers to this prompt."""
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="right")
    model = AutoModelForCausalLM.from_pretrained(TINY)
    start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    texts = [start + answer + tokenizer.eos_token for answer in answers]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, : len(tokenizer(start)["input_ids"])] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_code_trains_by_unit_tests(tmp_path):
    need_sandbox()
    row = rows_of("mbpp.jsonl")[3]
    data = write_rows(tmp_path / "rows.jsonl", [row, row])
    problems = load_problems(data)
    answers = [f"```python\ndef swap(p): return {value}\n```" for value in ("p[1], p[0]", "p")]
    model = teach(tmp_path / "model", problems[0]["prompt"], answers)
    options = ["--task", "code", "--dataset", data, "--model_name_or_path", model]
    results, table = train(tmp_path, *options, "--max_completion_length=64")
    columns = {name: problems[name][:1] * 16 for name in ("header", "setup", "tests", "names")}
    rewards = code_reward(texts_of(table), **columns)
    assert rewards == list(table["code_reward"])
    taught = [texts_of(table).count(answer) for answer in answers]
    assert min(taught) > 0
    for text, reward in zip(texts_of(table), rewards, strict=True):
        assert text not in answers or reward == (text == answers[0])
    check_run(tmp_path, results, table, rewards)
    first = next(log for log in results["log"] if "loss" in log)
    assert first["code/passed"] == pytest.approx(first["reward"])


# What is told before a model loads


@pytest.mark.parametrize("task", ROW_TASKS)
def test_a_task_without_a_data_set_is_an_error(tmp_path, task):
    with pytest.raises(ValueError, match=rf"dataset=generated, but task={task} generates none"):
        train(tmp_path, "--task", task)


def test_dialogue_without_a_reward_model_is_an_error(tmp_path):
    options = ["--task", "dialogue", "--dataset", str(DATA / "dialogues.jsonl")]
    with pytest.raises(ValueError, match=r"reward_model is not set, but task=dialogue"):
        train(tmp_path, *options)
