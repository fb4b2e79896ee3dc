"""The supervised baseline: its solutions are right, and it is trained and evaluated as said."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from lopti_trl.cli import VERBS
from lopti_trl.sft import SFTArguments, solution_texts
from lopti_trl.tasks import kk
from lopti_trl.tasks.kk_solutions import holds, solve_quiz
from lopti_trl.train import CONFIGS, load_tokenizer, model_path, parse_args

TINY = ["--config", str(CONFIGS / "sft" / "kk_tiny_cpu.yaml")]
SFT_RECIPES = sorted((CONFIGS / "sft").glob("*.yaml"))


@pytest.mark.parametrize("num_people", [2, 3, 5])
def test_every_worked_solution_earns_the_full_reward(num_people):
    puzzles = kk.generate_puzzles(num_people, 40, seed=1)
    for row in puzzles:
        text = solve_quiz(row["quiz"])
        assert kk.judge(text, row["names"], row["solution"], "strict").correct
        assert text == solve_quiz(row["quiz"])  # the words are those of the seed
    texts = {solve_quiz(puzzles[0]["quiz"], seed) for seed in range(8)}
    assert len(texts) > 4


def test_a_statement_holds_by_its_truth_table():
    both = ("and", ("telling-truth", 0), ("lying", 1))
    cases = [(False, False), (False, True), (True, False), (True, True)]
    assert [holds(both, case) for case in cases] == [False, False, True, False]
    assert [holds(("->", *both[1:]), case) for case in cases] == [True, True, True, False]
    assert [holds(("or", *both[1:]), case) for case in cases] == [True, False, True, True]
    assert [holds(("<=>", *both[1:]), case) for case in cases] == [False, True, True, False]
    assert [holds(("not", both[1]), case) for case in cases] == [True, True, False, False]


@pytest.mark.parametrize("path", SFT_RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_has_the_data_of_its_grpo_recipe(path, tmp_path):
    options = ["--use_cpu", "true", "--output_dir", str(tmp_path)]
    task, args, model = parse_args(["--config", str(path), *options], SFTArguments)
    theirs, grpo, their_model = parse_args(["--config", path.name, *options])
    # evaluated before and after only
    assert task == dataclasses.replace(theirs, eval_every_rollouts=None)
    assert model.model_name_or_path == their_model.model_name_or_path
    assert args.max_completion_length == grpo.max_completion_length


def test_puzzles_without_their_text_are_refused():
    puzzles = Dataset.from_dict({"prompt": ["x"], "names": [["A"]]})
    with pytest.raises(ValueError, match=r"columns prompt, names, but .* quiz column.*generated"):
        solution_texts(puzzles, seed=0)


def completion_loss(path: str, texts: Dataset) -> float:
    """Mean of -log p over the completions' tokens and their ends, one text at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), load_tokenizer(ModelConfig(path))
    losses = []
    for row in texts:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logps = model(ids).logits.log_softmax(-1)[0, :-1]
        losses.append(-logps.gather(1, ids[0, 1:, None])[len(prompt) - 1 :])
    return torch.cat(losses).mean().item()


needs_tiny = pytest.mark.skipif(
    not Path(model_path("kk-tiny")).is_dir(),
    reason="the tiny model is not there: python scripts/make_kk_tiny.py",
)


@needs_tiny
def test_it_trains_on_the_completion_alone_and_writes_what_train_writes(tmp_path):
    small = ["--train_puzzles", "32", "--test_puzzles", "4", "--max_completion_length", "16"]
    small += [
        "--num_people",
        "3",
        "--num_train_epochs",
        "2",
        "--disable_tqdm",
        "true",
        "--output_dir",
        str(tmp_path),
    ]
    VERBS["sft"]([*TINY, *small])
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["evaluation"].keys() == {"before", "after"}
    assert written["evaluation"]["after"].keys() == {"greedy", "sampled"}
    assert written["plan"] == {"method": "SFT", "optimizer_steps": 2}
    losses = [row["loss"] for row in written["log"] if "loss" in row]
    tokenizer = load_tokenizer(ModelConfig("kk-tiny"))
    puzzles = kk.load_puzzles("generated", "train", [3], 32, 0, tokenizer)
    texts = solution_texts(puzzles, seed=42)
    assert losses[0] == pytest.approx(completion_loss(model_path("kk-tiny"), texts), rel=1e-4)
    assert losses[1] < losses[0]
    assert (tmp_path / "model.safetensors").is_file()
