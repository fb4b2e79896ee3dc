"""Levels 1 to 5: estimators in closed form, a rigged model, resume after kill -9, no trace left."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from rigged import CHANCES, make_rigged
from transformers import AutoModelForCausalLM, AutoTokenizer

from lopti_trl import evaluation
from lopti_trl.engines import Sampling, TrainerEngine, TransformersEngine, random_state_kept
from lopti_trl.estimators import avg_at_k, bootstrap, interval, maj_at_k, pass_at_k, wilson
from lopti_trl.eval import EvalArguments, main, parse_args
from lopti_trl.evaluation import (
    EvaluationCallback,
    HeldOutArguments,
    Metric,
    Task,
    accuracy,
    count_samples,
    estimate,
    evaluate,
    evaluate_trainer,
    load_task,
    make_rows,
    markdown,
    math_task,
    mean_scores,
    plan_batches,
    read_samples,
)
from lopti_trl.tasks import kk
from lopti_trl.tasks import math as math_task_module
from lopti_trl.train import CONFIGS, PACKAGE

ROOT = PACKAGE.parent
TINY = PACKAGE / "assets" / "kk-tiny"
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


# Estimators


def test_avg_at_k_is_the_share_of_correct_samples():
    assert avg_at_k([True, False, False, True, False]) == 0.4


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (5, 3, 2), (6, 0, 3), (6, 6, 3), (7, 5, 3)])
def test_pass_at_k_is_the_share_of_choices_with_a_correct_sample(n, c, k):
    correct = [True] * c + [False] * (n - c)
    choices = [any(choice) for choice in itertools.combinations(correct, k)]
    assert pass_at_k(correct, k) == pytest.approx(sum(choices) / len(choices), abs=1e-15)


@pytest.mark.parametrize("p", [0.05, 0.4])
def test_pass_at_k_is_unbiased(p):
    n, k = 10, 4
    mean = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k([True] * c + [False] * (n - c), k)
        for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "right", "k", "expected"),
    [
        ("aab", "a", 3, 1.0),
        ("abb", "a", 3, 0.0),
        ("ab", "a", 2, 0.5),  # a tie of two
        ("abc", "c", 3, 1 / 3),
        ("aabbcc", "b", 6, 1 / 3),
        ("a--", "a", 3, 1.0),  # without an answer: no vote
        ("---", "a", 3, 0.0),
        ("aabbba", "a", 3, 0.5),  # two groups: right, wrong
        ("aabab", "a", 3, 1.0),  # the fourth and fifth make no group of three
    ],
)
def test_maj_at_k_by_hand(votes, right, k, expected):
    correct = [vote == right for vote in votes]
    votes = [None if vote == "-" else vote for vote in votes]
    assert maj_at_k(correct, votes, k) == pytest.approx(expected, abs=1e-15)


def test_maj_at_3_of_two_answers_has_its_closed_form_mean():
    p = 0.3
    outcomes = itertools.product((True, False), repeat=3)
    mean = sum(
        math.prod(p if mark else 1 - p for mark in marks) * maj_at_k(marks, list(marks), 3)
        for marks in outcomes
    )
    assert mean == pytest.approx(p**3 + 3 * p**2 * (1 - p), abs=1e-12)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_as_published(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_interval_holds_the_true_value_19_times_in_20():
    n, coverage = 100, []
    for p in np.linspace(0.05, 0.95, 19):
        chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        held = [low <= p <= high for low, high in (wilson(c, n) for c in range(n + 1))]
        coverage.append(sum(x for x, inside in zip(chances, held, strict=True) if inside))
    assert np.mean(coverage) == pytest.approx(0.95, abs=0.005)


def test_bootstrap_over_prompts_has_the_width_of_normal_theory():
    scores = np.random.default_rng(1).random(500)
    low, high = bootstrap([scores])
    error = scores.std() / math.sqrt(500)
    assert (low + high) / 2 == pytest.approx(scores.mean(), abs=0.1 * error)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.06)


def test_bootstrap_redraws_within_each_group_and_weighs_groups_alike():
    assert bootstrap([[0.2] * 5, [0.6] * 50]) == pytest.approx((0.4, 0.4))
    one, two = np.random.default_rng(2).random((2, 400))
    (low, high), error = bootstrap([one, two]), math.hypot(one.std(), two.std()) / 2 / 20
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.06)


def test_wilson_is_for_scores_of_0_and_1_and_the_bootstrap_for_others():
    assert interval([[1, 0, 1], [0, 0, 1]]) == wilson(3, 6)
    assert interval([[1.0] * 30]) == wilson(30, 30)  # a bootstrap would claim certainty
    assert interval([[0.5, 0.0, 1.0]]) == bootstrap([[0.5, 0.0, 1.0]])
    assert interval([[1, 0], [0, 0, 1]]) == bootstrap([[1, 0], [0, 0, 1]])


# Metrics, tables, batches


def test_metrics_share_the_samples_of_a_draw():
    metrics = [Metric.of(name) for name in ("greedy", "sampled", "pass@4", "maj@8")]
    assert count_samples(metrics) == {"greedy": 1, "sampled": 8}
    assert Metric.of("sampled").score([True, False], [1, 2]) == 0.5
    for name in ("pass", "pass@0", "best@4", "avg@4x"):
        with pytest.raises(ValueError, match=rf"metric '{name}' is unknown. Use greedy"):
            Metric.of(name)


def test_estimates_average_groups_as_the_paper_averages_puzzle_sizes():
    scores = {"greedy": {"3": [1, 1, 0, 0], "4": [1, 0, 0, 0]}, "avg@2": {"3": [1, 0.5], "4": [0]}}
    estimates = estimate(scores)
    assert estimates["greedy"]["3"]["value"] == 0.5
    average = estimates["greedy"]["average"]
    assert (average["value"], average["num_prompts"]) == (0.375, 8)
    assert (average["low"], average["high"]) == wilson(3, 8)
    assert estimates["avg@2"]["average"]["value"] == 0.375  # not 0.5, the mean over prompts
    assert accuracy({"kk": scores})["greedy"] == {"3": 0.5, "4": 0.25, "average": 0.375}
    several = {"aime": {"avg@2": {"aime": [0.5, 0.0]}}, "amc": {"avg@2": {"amc": [1.0]}}}
    assert accuracy(several) == {"avg@2": {"aime": 0.25, "amc": 1.0, "average": 0.625}}


def test_checkpoints_are_averaged_prompt_by_prompt():
    checkpoints = [{"kk": {"greedy": {"3": marks}}} for marks in ([1, 0, 0], [1, 1, 0], [1, 1, 0])]
    mean = mean_scores(checkpoints)
    assert mean["kk"]["greedy"]["3"] == pytest.approx([1, 2 / 3, 0])
    part = estimate(mean["kk"])["greedy"]["average"]
    assert (part["value"], part["num_prompts"]) == (pytest.approx(5 / 9), 3)


def test_the_markdown_table():
    estimates = {"m": {"kk": estimate({"greedy": {"2": [1, 1], "3": [0, 0]}})}}
    assert markdown(*make_rows(estimates)) == (
        "| task | prompts | greedy |\n"
        "| --- | --- | --- |\n"
        "| kk 2 | 2 | 100.0 (34.2-100.0) |\n"
        "| kk 3 | 2 | 0.0 (0.0-65.8) |\n"
        "| kk average | 4 | 50.0 (15.0-85.0) |\n"
    )
    header, rows = make_rows(estimates | {"n": {"amc": estimate({"avg@2": {"amc": [0.5]}})}})
    assert header == ["model", "task", "prompts", "greedy", "avg@2"]
    assert rows[-1] == ["n", "amc", "1", "", "50.0 (50.0-50.0)"]


def test_batches_keep_the_budget_and_hold_every_sample_once_longest_first():
    lengths = [random.Random(0).randrange(5, 60) for _ in range(40)]
    lengths[7] = 500  # alone over the budget
    todo = [(prompt, sample) for prompt in range(40) for sample in range(3)]
    batches = list(plan_batches(todo, lengths, max_tokens=20, batch_tokens=400))
    assert sorted(itertools.chain(*batches)) == todo
    sizes = [len(b) * (max(lengths[p] for p, _ in b) + 20) for b in batches]
    assert batches[:3] == [[(7, 0)], [(7, 1)], [(7, 2)]]
    assert max(sizes[3:]) <= 400
    order = [lengths[prompt] for prompt, _ in itertools.chain(*batches)]
    assert order == sorted(order, reverse=True)
    fuller = [
        (len(b) + 1) * (max(lengths[p] for p, _ in b) + 20) for b in batches[3:-1]
    ]  # one more row would not fit
    assert min(fuller) > 400


# A model whose chance of success is known


@pytest.fixture(scope="module")
def rigged():
    return make_rigged()


def rigged_task(num_prompts: int, word: str) -> Task:
    rng = random.Random(word)
    prompts = [
        " ".join([*(f"q{rng.randrange(7)}" for _ in range(rng.randrange(1, 5))), word])
        for _ in range(num_prompts)
    ]
    rows = {"prompt": prompts, "answer": ["1"] * num_prompts, "source": [word] * num_prompts}
    return math_task(Dataset.from_dict(rows), word)


def test_a_rigged_model_is_measured_within_its_interval(rigged, tmp_path):
    pytest.importorskip("math_verify")
    model, tokenizer = rigged
    words = ("easy", "hard")
    tasks = [rigged_task(150, word) for word in words]
    metrics = ["greedy", "sampled", "avg@6", "pass@2", "pass@6", "maj@3"]
    engine = TransformersEngine(model, tokenizer, batch_tokens=2000)
    result = evaluate(engine, tokenizer, tasks, metrics, Sampling(4, 1.0), 0, tmp_path)
    for word in words:
        right, wrong, other, none = CHANCES[word]
        chances = {"1": right, "2": wrong, "3": other, "-": none}
        majority = 0.0
        for votes in itertools.product(chances, repeat=3):
            given = [vote for vote in votes if vote != "-"]
            counts = {vote: given.count(vote) for vote in given}
            winners = [v for v in counts if counts[v] == max(counts.values())]
            if "1" in winners:
                majority += math.prod(chances[v] for v in votes) / len(winners)
        expected = {
            "sampled": right,
            "avg@6": right,
            "pass@2": 1 - (1 - right) ** 2,
            "pass@6": 1 - (1 - right) ** 6,
            "maj@3": majority,
        }
        estimates = estimate(result["scores"][word])
        for metric, value in expected.items():
            part = estimates[metric]["average"]
            assert part["low"] <= value <= part["high"], (word, metric, value, part)
            assert part["high"] - part["low"] < 0.17
        greedy = estimates["greedy"]["average"]
        assert greedy["value"] == (right > wrong)
        assert {"finished": 1.0, "tokens": 2.0, "without_reference": 0}.items() <= result[
            "samples"
        ][word]["sampled"].items()
        samples = read_samples(tmp_path / word / "sampled")
        assert len({(s["prompt"], s["sample"]) for s in samples}) == len(samples) == 150 * 6
        answered = np.mean([s["vote"] is not None for s in samples])
        assert answered == pytest.approx(1 - none, abs=0.02)


def test_problems_without_a_readable_reference_are_left_out_and_counted(rigged):
    pytest.importorskip("math_verify")
    model, tokenizer = rigged
    rows = {"prompt": ["q1 easy"] * 3, "answer": ["1", None, "2"], "source": ["x"] * 3}
    task = math_task(Dataset.from_dict(rows), "x")
    result = evaluate(
        TransformersEngine(model, tokenizer), tokenizer, [task], ["greedy"], Sampling(4)
    )
    assert result["scores"]["x"]["greedy"]["x"] == [1.0, 0.0]
    assert result["samples"]["x"]["greedy"]["without_reference"] == 1
    with pytest.raises(ValueError, match="no prompt has a reference answer"):
        estimate({"greedy": {"x": []}})


def test_votes_that_mean_the_same_count_together():
    pytest.importorskip("math_verify")
    votes = [["\\frac{1}{2}", "0.5", None, "3", "\\frac{2}{4}"], ["0.5", "7", "7.0", "7"]]
    assert math_task_module.merge_answers(votes) == [
        ["\\frac{1}{2}", "\\frac{1}{2}", None, "3", "\\frac{1}{2}"],
        ["0.5", "7", "7", "7"],
    ]
    assert math_task_module.final_answer("so \\boxed{ 2 } or \\boxed{3}") == "3"
    assert math_task_module.final_answer("so 3") is None


def test_the_models_own_generation_config_does_not_change_the_measurement(rigged):
    model, tokenizer = rigged
    engine = TransformersEngine(model, tokenizer)
    prompts = tokenizer(["q1 hard", "q2 q2 easy"])["input_ids"] * 20
    runs = []
    for settings in ({}, {"repetition_penalty": 50.0, "top_k": 1, "top_p": 0.1, "do_sample": True}):
        for name, value in settings.items():
            setattr(model.generation_config, name, value)
        runs.append([engine(prompts, Sampling(4, t), (1, 2)) for t in (0.0, 1.0)])
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0][1]}) > 2  # and samples were drawn
    for name in settings:
        setattr(model.generation_config, name, None)


# The shipped model by the command


@pytest.fixture(scope="module")
def tiny():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), tokenizer


def options(folder: Path, *more: str) -> list[str]:
    """A recipe of 12 puzzles: 3 batches greedy, 6 sampled."""
    recipe = {
        "model_name_or_path": "kk-tiny",
        "tasks": ["kk"],
        "num_people": [2, 3],
        "test_puzzles": 6,
        "metrics": ["greedy", "avg@2", "pass@2", "maj@2"],
        "max_completion_length": 24,
        "batch_tokens": 450,
        "use_cpu": True,
        "output_dir": str(folder / "out"),
    }
    path = folder / "eval.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return ["--config", str(path), *more]


def kept_samples(folder: Path, draw: str) -> list[dict]:
    samples = read_samples(folder / "out" / "samples" / "kk-tiny" / "kk" / draw)
    return sorted(samples, key=lambda sample: (sample["prompt"], sample["sample"]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an evaluation that nothing interrupted, and its estimates."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, main(*parse_args(options(folder)))


def test_the_command_writes_samples_json_and_markdown_that_agree(tmp_path):
    folder = tmp_path
    longer = ["--max_completion_length", "160", "--batch_tokens", "1700"]
    estimates = main(*parse_args(options(folder, *longer)))
    content = json.loads((folder / "out" / "results.json").read_text())
    assert content["estimates"] == estimates
    assert content["arguments"]["max_completion_length"] == 160
    greedy = estimates["kk-tiny"]["kk"]["greedy"]
    assert list(greedy) == ["2", "3", "average"]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    puzzles = kk.load_puzzles("generated", "test", [2, 3], 6, 0, tokenizer)
    for draw, num_samples in (("greedy", 1), ("sampled", 2)):
        samples = kept_samples(folder, draw)
        keys = [(sample["prompt"], sample["sample"]) for sample in samples]
        assert keys == [(p, s) for p in range(12) for s in range(num_samples)]
        rows = [puzzles[s["prompt"]] for s in samples]
        rewards = kk.kk_reward(
            [s["completion"] for s in samples],
            [row["names"] for row in rows],
            [row["solution"] for row in rows],
        )
        assert [s["correct"] for s in samples] == [reward == 3.0 for reward in rewards]
        assert len(list((folder / "out").rglob(f"{draw}/*.parquet"))) > num_samples
    by_size = [s["correct"] for s in kept_samples(folder, "greedy")]
    assert 0 < sum(by_size) + sum(s["correct"] for s in kept_samples(folder, "sampled")) < 36
    assert greedy["2"]["value"] == np.mean(by_size[:6])
    assert greedy["average"]["value"] == np.mean(by_size)
    assert "| kk average | 12 |" in (folder / "out" / "results.md").read_text()


def test_sampling_more_later_keeps_what_was_drawn(whole, tmp_path, monkeypatch):
    folder, _ = whole
    args = options(tmp_path)
    main(*parse_args(args))
    before = kept_samples(tmp_path, "sampled")
    assert before == kept_samples(folder, "sampled")  # the same seed, the same samples
    drawn = []
    write_part = evaluation.write_part

    def spy(folder, part):
        drawn.extend((s["prompt"], s["sample"]) for s in part)
        write_part(folder, part)

    monkeypatch.setattr(evaluation, "write_part", spy)
    main(*parse_args([*args, "--metrics", "avg@3", "pass@2"]))
    assert sorted(drawn) == [(prompt, 2) for prompt in range(12)]
    after = kept_samples(tmp_path, "sampled")
    assert [s for s in after if s["sample"] < 2] == before
    drawn.clear()
    main(*parse_args([*args, "--metrics", "greedy", "avg@2"]))
    assert drawn == []


def test_other_settings_do_not_mix_with_what_is_kept(whole):
    folder, _ = whole
    for change in (["--seed", "1"], ["--temperature", "0.5"], ["--max_completion_length", "32"]):
        name, value = change
        with pytest.raises(ValueError, match=rf"{name[2:].split('_')[0]}.*-> {value}.*output_dir"):
            main(*parse_args([*options(folder), *change, "--metrics", "avg@2"]))
    with pytest.raises(ValueError, match=r"prompts: .* -> "):
        main(*parse_args([*options(folder), "--dataset_seed", "5"]))


SPOTS = {
    "generation": "make_samples",
    "start of a part": "write_part",
    "end of a part": "write_part",
}


def start_and_die(folder: Path, spot: str, call: int) -> None:
    """Evaluate in this process, which kills itself at the n-th call of a function."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # the parent's
    name, calls = SPOTS.get(spot, ""), itertools.count(1)
    holder = evaluation.os if spot == "rename" else evaluation
    name = name or {"rename": "replace", "half a part": "pq"}[spot]
    if spot == "half a part":
        write_table = pq.write_table

        def original(table, path):
            write_table(table, path)
            os.truncate(path, path.stat().st_size // 2)

        holder, name = evaluation.pq, "write_table"
    else:
        original = getattr(holder, name)

    def deadly(*args, **kwargs):
        is_last = next(calls) == call
        if is_last and spot not in ("end of a part", "half a part"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = (original if is_last else getattr(original, "whole", original))(*args, **kwargs)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    if spot == "half a part":
        original.whole = write_table
    setattr(holder, name, deadly)
    main(*parse_args(options(folder)))


@forks
@pytest.mark.parametrize(
    ("spot", "call"),
    [
        ("generation", 1),
        ("generation", 6),
        ("start of a part", 3),
        ("half a part", 2),
        ("half a part", 9),
        ("rename", 4),  # settings.json is renamed too
        ("end of a part", 5),
    ],
)
def test_a_killed_evaluation_goes_on_to_the_same_samples(whole, tmp_path, spot, call):
    folder, estimates = whole
    process = multiprocessing.get_context("fork").Process(
        target=start_and_die, args=(tmp_path, spot, call)
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert main(*parse_args(options(tmp_path))) == estimates
    for draw in ("greedy", "sampled"):
        assert kept_samples(tmp_path, draw) == kept_samples(folder, draw)  # none twice, none lost


def test_a_command_killed_from_outside_goes_on(whole, tmp_path):
    folder, estimates = whole
    command = [sys.executable, str(ROOT / "scripts" / "eval.py"), *options(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600  # a hang
    while len(list((tmp_path / "out").rglob("*.parquet"))) < 3 and process.poll() is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert not (tmp_path / "out" / "results.json").exists()
    assert main(*parse_args(options(tmp_path))) == estimates
    for draw in ("greedy", "sampled"):
        assert kept_samples(tmp_path, draw) == kept_samples(folder, draw)


@pytest.mark.slow
def test_two_processes_answer_each_prompt_once(whole, tmp_path):
    folder, estimates = whole
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    args = options(tmp_path, "--test_puzzles", "6", "--batch_tokens", "400")
    run = subprocess.run(
        [*launcher, "--standalone", str(ROOT / "scripts" / "eval.py"), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["num_processes"] == 2
    for draw, num_samples in (("greedy", 1), ("sampled", 2)):
        keys = [(s["prompt"], s["sample"]) for s in kept_samples(tmp_path, draw)]
        assert keys == [(p, s) for p in range(12) for s in range(num_samples)]
    alone, together = kept_samples(folder, "greedy"), kept_samples(tmp_path, "greedy")
    assert [s["completion"] for s in together] == [s["completion"] for s in alone]
    assert content["estimates"]["kk-tiny"]["kk"]["greedy"] == estimates["kk-tiny"]["kk"]["greedy"]
    sampled = kept_samples(tmp_path, "sampled")
    pairs = zip(sampled[::2], sampled[1::2], strict=True)
    assert sum(a["completion"] != b["completion"] for a, b in pairs) >= 11  # ranks draw apart


@pytest.fixture
def run_folder(tmp_path, tiny):
    """A run with three checkpoints, the newest of them broken."""
    model, tokenizer = tiny
    for step in (10, 20, 30):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if step != 30:
            (folder / "trainer_state.json").write_text("{}")
    return tmp_path / "run"


def test_the_last_checkpoints_of_a_run_and_their_mean(run_folder, tmp_path):
    path = run_folder / "checkpoint-20"
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)  # a checkpoint that knows nothing
    model.save_pretrained(path)
    args = options(tmp_path, "--model_name_or_path", str(run_folder), "--metrics", "avg@4")
    longer = ["--num_people", "2", "--max_completion_length", "160", "--batch_tokens", "8000"]
    estimates = main(*parse_args([*args, *longer, "--last_checkpoints", "2"]))
    assert list(estimates) == ["checkpoint-10", "checkpoint-20", "mean of 2"]
    first, second, mean = (of["kk"]["avg@4"]["average"]["value"] for of in estimates.values())
    assert first > second == 0
    assert mean == first / 2
    table = (tmp_path / "out" / "results.md").read_text()
    assert re.search(r"\| mean of 2 \| kk \| 6 \| ", table)
    with pytest.raises(ValueError, match=r"last_checkpoints=3, but .* has 2 whole ones. Ask for"):
        main(*parse_args([*args, "--last_checkpoints", "3"]))


def test_kk_by_the_command_is_what_the_reward_says_by_hand(tiny):
    _, tokenizer = tiny
    args = dataclasses.replace(HeldOutArguments(), num_people=[2], test_puzzles=3)
    task = load_task("kk", tokenizer, args)
    row = task.rows[0]
    lines = "\n".join(
        f"({i}) {name} is a {'knight' if role else 'knave'}"
        for i, (name, role) in enumerate(zip(row["names"], row["solution"], strict=True), 1)
    )
    right, bare = f"ok</think><answer>{lines}</answer>", f"<answer>{lines}</answer>"
    assert task.judge([right, bare], [row, row]) == [(True, str(row["solution"])), (False, None)]


def test_tasks_by_name_and_by_file(tiny, tmp_path):
    _, tokenizer = tiny
    args = dataclasses.replace(HeldOutArguments(), num_people=[2], test_puzzles=3)
    rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(5)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = load_task(str(path), tokenizer, args, num_problems=2)
    assert (task.name, len(task.rows), set(task.groups)) == ("sums", 2, {"sums"})
    task = load_task(f"mine={path}", tokenizer, args)
    assert (task.name, len(task.rows), task.groups[0]) == ("mine", 5, "mine")
    assert task.rows["answer"] == ["1", "2", "3", "4", "5"]
    kk.generate_puzzles(2, 4, seed=3).to_json(tmp_path / "puzzles.json")
    task = load_task(f"kk={tmp_path / 'puzzles.json'}", tokenizer, args)
    assert (task.name, len(task.rows), task.groups) == ("kk", 3, ["2"] * 3)
    with pytest.raises(FileNotFoundError, match=r"no such file: none\.parquet"):
        load_task("x=none.parquet", tokenizer, args)


def test_wrong_arguments_say_what_to_do():
    for changes, message in (
        ({"metrics": ["best@2"]}, "metric 'best@2' is unknown. Use greedy"),
        ({"test_puzzles": 0}, "test_puzzles=0 leaves nothing to evaluate. Use 1"),
        ({"temperature": 0.0}, r"temperature=0.0 makes every sample the same.*metrics: \[greedy\]"),
    ):
        with pytest.raises(ValueError, match=message):
            EvalArguments(**changes)
    with pytest.raises(ValueError, match="model_name_or_path is not set"):
        main(*parse_args(["--use_cpu", "true"]))
    with pytest.raises(ValueError, match=r"tasks=.* name one twice"):
        main(*parse_args(["--model_name_or_path", "kk-tiny", "--tasks", "kk", "kk"]))
    with pytest.raises(FileNotFoundError, match=r"No config no.yaml.*eval: kk.yaml, math.yaml"):
        parse_args(["--config", "no.yaml"])


@pytest.mark.parametrize("recipe", sorted(p.name for p in (CONFIGS / "eval").glob("*.yaml")))
def test_every_evaluation_recipe_and_every_flag_in_its_header_parses(recipe):
    header = (CONFIGS / "eval" / recipe).read_text().split("\n\n")[0]
    lines = [line.split(" # ")[0] for line in header.splitlines() if "--" in line]
    args, model = parse_args(["--config", recipe])
    assert (args.last_checkpoints, args.engine, model.dtype) == (3, "vllm", "bfloat16")
    flags = [re.findall(r"--(?!config)\S+(?: [^-\s#]\S*)+", line) for line in lines]
    assert sum(map(len, flags)) >= 4
    for line in flags:
        parse_args(["--config", recipe, *(word for flag in line for word in flag.split())])


def test_vllm_is_asked_for_with_its_remedy(tmp_path):
    if "vllm" in sys.modules:
        pytest.skip("vLLM is here")
    with pytest.raises(ImportError, match=r"pip install 'lopti-trl\[vllm\]'"):
        main(*parse_args([*options(tmp_path), "--engine", "vllm"]))
    (tmp_path / "adapter_config.json").touch()
    from lopti_trl.engines import VLLMEngine

    with pytest.raises(ValueError, match=r"is an adapter.*merge_and_unload"):
        VLLMEngine(str(tmp_path), None)


# In training

LETTERS_PROMPTS = ["abc", "hello there", "the quick brown fox", "x", "zz"]


def letters_task() -> Task:
    """Right if the completion has an even number of vowels: some are."""

    def judge(completions, rows):
        counts = [sum(map(text.count, "aeiou")) for text in completions]
        return [(count % 2 == 0, str(count)) for count in counts]

    rows = Dataset.from_dict({"prompt": LETTERS_PROMPTS})
    return Task("letters", rows, ["short", "long", "long", "short", "short"], judge)


def optimizer_state(trainer) -> list[torch.Tensor]:
    states = trainer.optimizer.state.values()
    return [value for state in states for value in state.values()]


def test_training_with_the_callback_equals_training_without_bit_for_bit(make_trainer, tmp_path):
    # one logging step is longer than the evaluation's: training metrics wait while it runs
    fields = {"max_steps": 8, "ar_alpha": 0.3, "lopti_eta": 0.5, "logging_steps": 3, "beta": 0.04}
    runs = []
    for every_steps in (None, 1, 2):
        trainer = make_trainer(**fields)
        if every_steps:
            metrics = ["greedy", "sampled", "avg@3", "pass@2", "maj@3"]
            how = {"tasks": [letters_task()], "metrics": metrics}
            callback = EvaluationCallback(trainer, every_steps, tmp_path / "eval", **how)
            trainer.add_callback(callback)
        trainer.train()
        rng = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())
        runs.append((trainer, rng, every_steps))
        if every_steps:
            steps = list(range(every_steps, 9, every_steps))
            assert list(callback.scores) == steps
            logged = [row["step"] for row in trainer.state.log_history if "eval_avg@3/long" in row]
            assert logged == steps
    (plain, plain_rng, _), *evaluated = runs
    for trainer, rng, _ in evaluated:
        for name, value in plain.model.state_dict().items():
            assert torch.equal(value, trainer.model.state_dict()[name]), name
        for one, other in zip(optimizer_state(plain), optimizer_state(trainer), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(plain_rng[0], rng[0])
        assert (plain_rng[1] == rng[1]).all()
        assert plain_rng[2] == rng[2]
        timing = ("_time", "_runtime", "_per_second", "flos")
        logs = [
            [
                {k: v for k, v in row.items() if not k.endswith(timing)}
                for row in t.state.log_history
                if not any(key.startswith("eval_") for key in row)
            ]
            for t in (plain, trainer)
        ]
        assert repr(logs[0]) == repr(logs[1])
        assert any("lopti/low/loss" in row for row in logs[0])


def test_an_evaluation_in_training_is_that_of_the_weights_at_that_step(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=4, learning_rate=5e-2)
    how = {"tasks": [letters_task()], "metrics": ["greedy", "avg@4"], "temperature": 0.9}
    callback = EvaluationCallback(trainer, 2, tmp_path / "eval", **how)
    trainer.add_callback(callback)
    before = evaluate_trainer(trainer, **how)
    trainer.train()
    assert evaluate_trainer(trainer, **how) == callback.scores[4]
    assert before != callback.scores[4]
    kept = read_samples(tmp_path / "eval" / "step-4" / "letters" / "sampled")
    assert len(kept) == 4 * len(LETTERS_PROMPTS)
    groups = json.loads((tmp_path / "eval" / "step-4" / "results.json").read_text())["estimates"]
    assert set(groups["step-4"]["letters"]["greedy"]) == {"short", "long", "average"}
    mean = callback.mean_of_last(2)["letters"]["avg@4"]["long"]
    both = [callback.scores[step]["letters"]["avg@4"]["long"] for step in (2, 4)]
    assert mean == [(a + b) / 2 for a, b in zip(*both, strict=True)]
    resumed = EvaluationCallback(trainer, 2, tmp_path / "eval", **how)
    resumed.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert resumed.scores == callback.scores


def test_the_trainers_way_to_generate_is_the_transformers_engines(make_trainer, tokenizer):
    trainer = make_trainer(temperature=0.3, top_k=2)  # of rollouts: not the evaluation's
    trainer.model.train()
    settings = {**trainer.generation_kwargs}
    prompts = tokenizer(LETTERS_PROMPTS)["input_ids"]
    engines = [TrainerEngine(trainer), TransformersEngine(trainer.model, tokenizer)]
    for sampling in (Sampling(8), Sampling(8, 1.0), Sampling(5, 0.7, top_p=0.5, top_k=9)):
        with random_state_kept():
            one, other = (engine(prompts, sampling, (3, 1, 4)) for engine in engines)
        assert one == other
        assert max(map(len, one)) == sampling.max_tokens
    assert trainer.generation_kwargs == settings
    assert trainer.model.training
