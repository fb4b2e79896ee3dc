"""A colocated engine samples with the weights of the last update, and its rows stay together."""

import json

import pytest
import torch
from peft import LoraConfig
from trl.generation.vllm_generation import VLLMGeneration

from vllm_engine.two_ranks import launch

ROLLOUT_BATCHES = 6
STEPS = 4 * ROLLOUT_BATCHES  # two micro-batches in each of two phases
EXACT = 1e-4  # of float32 log-probs
BFLOAT16 = {"dtype": "bfloat16"}


def largest_difference(trainer, rollout: int) -> float:
    """Between what the engine said about its tokens and what the trained weights say."""
    said = trainer.kept(rollout, "sampling_per_token_logps")
    return (said - trainer.score(rollout)).abs().max().item()


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        ({"lopti_schedule": "batch"}, {}),
        ({"lopti_schedule": "minibatch"}, {}),
        ({"vllm_importance_sampling_correction": False}, {}),
        ({}, {"enforce_eager": False}),
    ],
    ids=["batch", "minibatch", "no correction", "compiled"],
)
def test_the_engine_samples_with_the_weights_of_every_update(make_trainer, fields, engine):
    trainer = make_trainer(engine=engine, max_steps=STEPS, **fields)
    trainer.train()
    assert len(trainer.rollouts) == ROLLOUT_BATCHES
    for rollout in range(ROLLOUT_BATCHES):
        assert largest_difference(trainer, rollout) < EXACT
        assert trainer.score(rollout).mean() < -0.05  # a policy sure of itself would agree anyway
    for before, after in zip(trainer.parameters, trainer.parameters[1:], strict=False):
        moved = [(before[name] - after[name]).abs().max().item() for name in before]
        assert min(moved) > 1e-3  # every tensor: a layer left out of the sync would show
    logged = [
        row["sampling/sampling_logp_difference/max"]
        for row in trainer.state.log_history
        if "sampling/sampling_logp_difference/max" in row
    ]
    has_correction = trainer.args.vllm_importance_sampling_correction
    assert len(logged) == (ROLLOUT_BATCHES if has_correction else 0)
    assert all(value < EXACT for value in logged)


def test_an_engine_that_is_never_synced_shows(make_trainer, monkeypatch):
    """The test above is able to fail."""
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: None)
    trainer = make_trainer(max_steps=STEPS)
    trainer.train()
    differences = [largest_difference(trainer, rollout) for rollout in range(ROLLOUT_BATCHES)]
    assert differences[0] < EXACT  # the engine read the same file
    assert min(differences[1:]) > 0.1


def test_an_engine_gets_the_adapter_merged_into_its_weights(make_trainer):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    trainer = make_trainer(max_steps=12, peft_config=lora)
    trainer.train()
    for rollout in range(3):
        assert largest_difference(trainer, rollout) < EXACT
    adapted = trainer.score(2)
    for name, value in trainer.parameters[2].items():
        if "lora_B" in name:
            value.zero_()
    assert (adapted - trainer.score(2)).abs().max() > 0.1


def test_each_completion_belongs_to_its_prompt(make_trainer):
    trainer = make_trainer(max_steps=8, learning_rate=1e-4)  # it goes on heeding the prompt
    trainer.train()
    for rollout, rows in enumerate(trainer.rollouts):
        prompts = rows["prompt_ids"].tolist()
        other = [next(i for i, p in enumerate(prompts) if p != prompt) for prompt in prompts]
        matched, swapped = trainer.score(rollout), trainer.score(rollout, other)
        assert largest_difference(trainer, rollout) < EXACT
        assert (matched - swapped).mean() > 0.5  # nats a token


@pytest.mark.parametrize("correction", [True, False])
def test_membership_comes_from_the_training_engine(make_trainer, correction):
    """bfloat16 makes the engine disagree: eta lies between what the two say about a token."""
    fields = {
        "engine": BFLOAT16,
        "learning_rate": 1e-3,
        "vllm_importance_sampling_correction": correction,
    }
    trainer = make_trainer(max_steps=1, **fields)
    trainer.train()
    ours = trainer.kept(0, "old_per_token_logps").exp()
    engines = trainer.kept(0, "sampling_per_token_logps").exp()
    token = (ours - engines).abs().argmax()
    assert (ours - engines).abs()[token] > 1e-3
    eta = ((ours + engines) / 2)[token].item()

    trainer = make_trainer(max_steps=STEPS, lopti_eta=eta, **fields)
    trainer.train()
    for rollout in range(ROLLOUT_BATCHES):
        old_logps = trainer.kept(rollout, "old_per_token_logps")
        torch.testing.assert_close(old_logps, trainer.score(rollout), atol=EXACT, rtol=0)
        assert torch.equal(trainer.kept(rollout, "low_prob_mask"), old_logps.exp() < eta)
    low = trainer.kept(0, "low_prob_mask")
    assert low[token] == (ours[token] < eta)
    assert low[token] != (engines[token] < eta)


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_update_options_keep_the_correction_with_its_tokens(make_trainer, mode):
    """(B, 1) and (B, T) ratios through rows that move, leave and are cut."""
    finals = []
    for tricks in (True, False):
        trainer = make_trainer(
            engine=BFLOAT16,
            max_steps=4,
            learning_rate=1e-4,
            adam_epsilon=1e-3,  # or a gradient of mere rounding moves by the learning rate
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            steps_per_generation=4,
            vllm_importance_sampling_mode=mode,
            **dict.fromkeys(
                ("update_trim", "update_balance", "update_skip", "update_cut", "update_project"),
                tricks,
            ),
        )
        trainer.train()
        ratio = trainer.rollouts[0]["importance_sampling_ratio"]
        assert ratio.shape[1] == (1 if mode == "sequence_mask" else 12)
        assert (ratio - 1).abs().max() > 1e-2
        finals.append([p.detach().clone() for p in trainer.model.parameters()])
    first = [p.clone() for p in trainer.parameters[0].values()]
    for ours, stock, start in zip(*finals, first, strict=True):
        torch.testing.assert_close(ours - start, stock - start, atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks_sample_with_the_new_weights_and_differ(tmp_path, tensor_parallel):
    """As two engines, and as the halves of one, which must draw the same tokens."""
    launch("colocate", str(tensor_parallel), tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}of2.txt").read_text()) for rank in (0, 1))
    assert max(first["differences"] + second["differences"]) < EXACT
    for ours, theirs in zip(first["completions"], second["completions"], strict=True):
        assert sorted(ours) != sorted(theirs)  # of the same prompt
