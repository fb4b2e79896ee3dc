"""The evaluation command with vLLM and with transformers: one model, the same measurement."""

import json

import pytest
import torch
import vllm
import yaml
from datasets import Dataset

from lopti_trl.engines import Sampling, TransformersEngine
from lopti_trl.eval import main, parse_args
from lopti_trl.evaluation import EvaluationCallback, Task, evaluate, read_samples

OPTIONS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 * 2**20,  # engines outlive tests
    # no prompt in two parts: there vLLM 0.30 rewinds a request's generator, which a CPU's cannot
    "max_num_batched_tokens": 32_768,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(estimates, folder) of each engine."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("evaluation")
    real = vllm.LLM
    patch.setattr(vllm, "LLM", lambda model, **options: real(model, **{**options, **OPTIONS}))
    recipe = {
        "model_name_or_path": "kk-tiny",
        "dtype": "float32",
        "use_cpu": True,
        "num_people": [2, 3],
        "test_puzzles": 20,
        "metrics": ["greedy", "avg@4", "pass@4"],
        "max_completion_length": 224,
        "vllm_max_model_length": 512,
    }
    found = {}
    for engine in ("transformers", "vllm"):
        output = folder / engine
        path = folder / f"{engine}.yaml"
        path.write_text(yaml.safe_dump({**recipe, "engine": engine, "output_dir": str(output)}))
        found[engine] = main(*parse_args(["--config", str(path)])), output
    patch.undo()
    return found


def samples(results, engine: str, draw: str) -> list[dict]:
    folder = results[engine][1] / "samples" / "kk-tiny" / "kk" / draw
    return sorted(read_samples(folder), key=lambda sample: (sample["prompt"], sample["sample"]))


def test_greedy_agrees_answer_by_answer(results):
    ours, theirs = (samples(results, engine, "greedy") for engine in ("transformers", "vllm"))
    assert len(ours) == 40
    assert theirs == ours  # text, length, how it ended, verdict and vote


def test_samples_agree_within_the_interval(results):
    for metric in ("avg@4", "pass@4"):
        ours, theirs = (
            results[engine][0]["kk-tiny"]["kk"][metric]["average"]
            for engine in ("transformers", "vllm")
        )
        assert ours["low"] <= theirs["value"] <= ours["high"]
        assert theirs["low"] <= ours["value"] <= theirs["high"]
        assert 0 < ours["value"] < 1


def test_vllm_draws_each_sample_once_and_apart(results):
    drawn = samples(results, "vllm", "sampled")
    assert [(s["prompt"], s["sample"]) for s in drawn] == [
        (prompt, sample) for prompt in range(40) for sample in range(4)
    ]
    texts = [{s["completion"] for s in drawn[start : start + 4]} for start in range(0, 160, 4)]
    assert sum(len(group) > 1 for group in texts) > 35
    settings = results["vllm"][1] / "samples" / "kk-tiny" / "kk" / "sampled" / "settings.json"
    assert json.loads(settings.read_text())["engine"] == "vllm"


def letters_task() -> Task:
    """Right if the completion has an even number of letters e."""
    rows = Dataset.from_dict({"prompt": ["Zoey is a knave", "Luke", "a very special island"]})

    def judge(completions, rows):
        return [(text.count("e") % 2 == 0, None) for text in completions]

    return Task("letters", rows, ["letters"] * 3, judge)


def test_a_colocated_engine_evaluates_the_trainers_weights_and_leaves_no_trace(
    make_trainer, tmp_path
):
    plain, watched = make_trainer(max_steps=6), make_trainer(max_steps=6)
    how = {"tasks": [letters_task()], "metrics": ["greedy", "avg@8"]}
    callback = EvaluationCallback(watched, 2, tmp_path / "evaluation", **how)
    watched.add_callback(callback)
    plain.train()
    watched.train()
    assert list(callback.scores) == [2, 4, 6]
    assert plain.completions() == watched.completions()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, watched.model.state_dict()[name]), name
    kept = read_samples(tmp_path / "evaluation" / "step-6" / "letters" / "greedy")
    engine = TransformersEngine(watched.model, watched.processing_class)
    again = evaluate(
        engine, watched.processing_class, how["tasks"], ["greedy"], Sampling(12), 0, tmp_path / "hf"
    )
    assert kept == read_samples(tmp_path / "hf" / "letters" / "greedy")
    assert again["scores"]["letters"]["greedy"] == callback.scores[6]["letters"]["greedy"]
    assert watched.vllm_generation.temperature == 0.9  # the rollouts'
