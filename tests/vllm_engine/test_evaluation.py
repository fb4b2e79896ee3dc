"""Evaluation by vLLM: as transformers evaluates, in training too."""

import functools
import json
import math

import pytest
import torch
import vllm

from vllm_engine.conftest import MODEL

engines = pytest.importorskip("lopti_trl.engines", reason="evaluation knows no vLLM here yet")

from lopti_trl.eval import main, parse_args  # noqa: E402

from lopti_trl.evaluation import (  # noqa: E402
    EvaluationCallback,
    HeldOutArguments,
    evaluate_trainer,
    load_task,
    read_samples,
)

NUM_PUZZLES, NUM_SAMPLES = 60, 4


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Evaluate by the command: `evaluate("vllm")` gives accuracy and samples by way of drawing."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no second process, which imports
    options = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 32 * 2**20,
        "max_num_batched_tokens": 2**15,  # a seeded prompt cut in two is an error on CPU
    }
    monkeypatch.setattr(vllm, "LLM", functools.partial(vllm.LLM, **options))

    def run(engine: str, name: str = "", **changes) -> tuple[dict, dict[str, list[dict]]]:
        folder = tmp_path / f"{engine}{name}"
        options = {
            "model_name_or_path": MODEL,
            "num_people": [3],
            "test_puzzles": NUM_PUZZLES,
            "metrics": ["greedy", f"avg@{NUM_SAMPLES}"],
            "temperature": 0.5,
            "max_completion_length": 64,
            "dtype": "float32",
            "use_cpu": True,
            "vllm_max_model_length": 512,
            "engine": engine,
            "output_dir": str(folder),
            **changes,
        }
        (tmp_path / "eval.yaml").write_text(json.dumps(options))
        [[tasks]] = [list(main(*parse_args(["--config", str(tmp_path / "eval.yaml")])).values())]
        accuracy = {metric: groups["average"]["value"] for metric, groups in tasks["kk"].items()}
        [kept] = (folder / "samples").iterdir()
        draws = {draw: read_samples(kept / "kk" / draw) for draw in ("greedy", "sampled")}
        key = ("prompt", "sample")
        return accuracy, {
            draw: sorted(samples, key=lambda sample: [sample[name] for name in key])
            for draw, samples in draws.items()
        }

    return run


def test_vllm_evaluates_as_transformers_does(evaluate):
    (ours, our_samples), (theirs, their_samples) = evaluate("vllm"), evaluate("transformers")
    assert our_samples["greedy"] == their_samples["greedy"]  # text, length, end and mark of each
    assert ours["greedy"] == theirs["greedy"]
    assert len({sample["completion"] for sample in our_samples["greedy"]}) > NUM_PUZZLES / 4
    assert sum(sample["finished"] for sample in our_samples["greedy"]) > 0
    metric = f"avg@{NUM_SAMPLES}"
    mean, num_samples = (ours[metric] + theirs[metric]) / 2, NUM_PUZZLES * NUM_SAMPLES
    assert 0.02 < mean < 0.98
    deviation = math.sqrt(2 * mean * (1 - mean) / num_samples)
    assert abs(ours[metric] - theirs[metric]) < 4 * deviation


def test_the_seed_decides_the_samples_of_vllm(evaluate):
    (_, first), (_, again), (_, other) = (
        evaluate("vllm", name, seed=seed, test_puzzles=8)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert first["greedy"] == other["greedy"]
    texts = [
        [sample["completion"] for sample in samples["sampled"]] for samples in (first, again, other)
    ]
    assert texts[0] != texts[2]
    of_prompts = zip(*[iter(texts[0])] * NUM_SAMPLES, strict=True)
    assert sum(len(set(group)) > 1 for group in of_prompts) > 4  # no copies


def test_evaluating_by_the_colocated_engine_leaves_no_trace_in_training(make_trainer, tmp_path):
    runs = []
    for every_steps in (None, 3):  # within a rollout batch of four steps
        trainer = make_trainer(max_steps=8, output_dir=tmp_path / f"out{every_steps}")
        if every_steps:
            arguments = HeldOutArguments(num_people=[2], test_puzzles=8)
            task = load_task("kk", trainer.processing_class, arguments)
            callback = EvaluationCallback(
                trainer, every_steps, tmp_path / "eval", tasks=[task], metrics=["greedy", "avg@2"]
            )
            trainer.add_callback(callback)
        trainer.train()
        runs.append(trainer)
    plain, evaluated = runs
    assert sorted(callback.scores) == [3, 6]
    assert plain.completions() == evaluated.completions()
    for ours, theirs in zip(plain.model.parameters(), evaluated.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_colocated_engine_evaluates_the_weights_of_this_step(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=6, learning_rate=1e-3, vllm_max_model_length=512)
    trainer.train()
    arguments = HeldOutArguments(num_people=[2], test_puzzles=16)
    task = load_task("kk", trainer.processing_class, arguments)
    prompts = trainer.processing_class(list(task.rows["prompt"]))["input_ids"]
    sampling = engines.Sampling(max_tokens=12)
    by_vllm = engines.TrainerEngine(trainer)(prompts, sampling, (0,))
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    assert by_vllm == engines.TransformersEngine(model, tokenizer)(prompts, sampling, (0,))
    scores = evaluate_trainer(trainer, tasks=[task], metrics=["greedy"])
    assert len(scores["kk"]["greedy"]["2"]) == 16
