"""Level 3: what we lean on in TRL 1.16 and transformers. A bump of TRL starts by reading these."""

import inspect
import subprocess
import sys

import pytest
import torch
import trl
from conftest import PROMPTS
from trl import GRPOTrainer


def test_trl_is_the_minor_version_that_was_read():
    assert trl.__version__.startswith("1.16.")


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("_compute_loss", ["self", "model", "inputs"]),
        (
            "_calculate_rewards",
            ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        ),
        ("_get_grad_norm", ["self", "model", "grad_norm"]),
    ],
)
def test_overridden_methods_keep_their_parameters(method, parameters):
    assert list(inspect.signature(getattr(GRPOTrainer, method)).parameters) == parameters


def test_num_iterations_is_read_where_a_second_phase_needs_it_and_nowhere_else():
    """Buffer replay, sampler repeats and the old log-probs; `_compute_loss` only has a comment."""
    readers = {
        name
        for name, method in inspect.getmembers(GRPOTrainer, inspect.isfunction)
        if "self.num_iterations" in inspect.getsource(method)
    }
    assert readers == {
        "__init__",
        "get_train_dataloader",
        "_get_train_sampler",
        "_prepare_inputs",
        "_generate_and_score_completions",
    }


def test_the_buffer_is_a_list_of_slices_and_the_micro_step_counter_moves_by_one(make_trainer):
    trainer = make_trainer(GRPOTrainer, max_steps=3)
    steps = []

    def spy(model, inputs):
        steps.append(trainer._step)
        assert inputs is trainer._buffered_inputs[trainer._step % 2]
        return GRPOTrainer._compute_loss(trainer, model, inputs)

    trainer._compute_loss = spy
    trainer.train()
    assert steps == [0, 1, 2]


def test_the_policy_is_scored_once_a_loss(make_trainer):
    """The gradient gate is consumed by the first scoring inside `_compute_loss`."""
    trainer = make_trainer(GRPOTrainer, beta=0.04)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs([{"prompt": p} for p in PROMPTS[:2] for _ in range(4)])
    calls = []
    score = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: calls.append(k) or score(*a, **k)
    trainer._compute_loss(trainer.model, inputs)
    assert len(calls) == 1


def test_trl_leaves_old_log_probs_out_when_generation_and_update_are_aligned(make_trainer):
    """Why the trainer raises `num_iterations` while it generates."""
    for steps_per_generation, given in ((1, False), (2, True)):
        trainer = make_trainer(GRPOTrainer, steps_per_generation=steps_per_generation)
        trainer.model.train()
        count = 4 * steps_per_generation
        inputs = trainer._prepare_inputs([{"prompt": PROMPTS[i // 4]} for i in range(count)])
        assert ("old_per_token_logps" in inputs) is given


def test_weights_import_torch_and_nothing_heavier():
    code = "import sys, lopti_trl.weights, lopti_trl.phases; print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_gating_by_where_and_detach_keeps_values_and_splits_gradients():
    x = torch.randn(4, requires_grad=True)
    gate = torch.tensor([True, False, True, False])
    gated = torch.where(gate, x, x.detach())
    assert torch.equal(gated, x)
    (gated**2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() * gate)
