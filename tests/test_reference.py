"""Level 4: the trainer against an independent implementation of the method (reference.py)."""

import copy
import itertools

import pytest
import torch
from conftest import PROMPTS, letters_reward
from datasets import Dataset
from reference import Method, train_on_rollout_batch
from transformers import AutoModelForCausalLM

from lopti_trl import LoptiGRPOTrainer

ROLLOUT_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class RecordingTrainer(LoptiGRPOTrainer):
    """Keeps every rollout batch, as buffered."""

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        batches = self.__dict__.setdefault("rollout_batches", [])
        if not batches or batches[-1] is not self._buffered_inputs:
            batches.append(self._buffered_inputs)
        return inputs


def with_rewards(batch: dict) -> dict:
    """A micro-batch as the reference takes it: rewards and groups made anew from the ids."""
    completions = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    ]
    prompts = [
        tuple(ids[mask.bool()].tolist())
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    return {
        **{key: batch[key] for key in ROLLOUT_KEYS},
        "rewards": torch.tensor(letters_reward(completions)),
        "group": torch.tensor([hash(prompt) for prompt in prompts]),
    }


def run_both(make_trainer, model_dir, method: Method, optim: str, accumulation: int, **fields):
    """Models after three rollout batches: the trainer's (`fields` changed) and the reference's."""
    micro_batch = 8 // (2 * accumulation)  # two optimizer steps a phase
    learning_rate = {"sgd": 0.1, "adamw_torch": 1e-3}[optim]
    lopti = method.eta is not None or method.quantile is not None
    trainer = make_trainer(
        RecordingTrainer,
        **{
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": 2 * accumulation,
            "optim": optim,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "constant",
            "max_steps": 3 * 2 * method.num_iterations * (2 if lopti else 1),
            "ar_alpha": method.alpha,
            "lopti_eta": method.eta,
            "lopti_quantile": method.quantile,
            "lopti_order": method.order,
            "lopti_schedule": method.schedule,
            "num_iterations": method.num_iterations,
            "beta": method.beta,
            "use_bias_correction_kl": False,
            "delta": method.dual_clip,
            "temperature": method.temperature,
            **fields,
        },
    )
    trainer.train_dataset = Dataset.from_dict({"prompt": PROMPTS})  # unique: one prompt a group
    trainer.train()
    assert len(trainer.rollout_batches) == 3

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    reference_model = copy.deepcopy(model)
    optimizer = {"sgd": torch.optim.SGD, "adamw_torch": torch.optim.AdamW}[optim](
        model.parameters(), lr=learning_rate, weight_decay=0.0
    )
    for batches in trainer.rollout_batches:
        train_on_rollout_batch(
            model,
            optimizer,
            [with_rewards(batch) for batch in batches],
            method,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=1.0,
            reference_model=reference_model,
        )
    return trainer.model, model


def max_difference(ours, theirs) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


TOLERANCE = {"sgd": 1e-6, "adamw_torch": 1e-5}


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("order", ["low_first", "high_first"])
@pytest.mark.parametrize("schedule", ["batch", "minibatch"])
def test_lopti_with_ar_equals_the_reference(
    make_trainer, model_dir, schedule, order, accumulation, optim
):
    method = Method(alpha=0.3, eta=0.5, order=order, schedule=schedule, temperature=0.7)
    ours, theirs = run_both(make_trainer, model_dir, method, optim, accumulation)
    assert max_difference(ours, theirs) <= TOLERANCE[optim]


@pytest.mark.parametrize(
    "method",
    [
        Method(),
        Method(alpha=1.0),
        Method(eta=0.3, beta=0.04),
        Method(quantile=0.4),
        Method(alpha=0.3, eta=0.5, num_iterations=2),
        Method(alpha=0.2, eta=0.5, beta=0.04, dual_clip=1.5, temperature=1.3),
    ],
    ids=str,
)
def test_each_method_equals_the_reference(make_trainer, model_dir, method):
    ours, theirs = run_both(make_trainer, model_dir, method, "sgd", accumulation=2)
    assert max_difference(ours, theirs) <= TOLERANCE["sgd"]


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
@pytest.mark.parametrize(
    "wrong",
    [{"lopti_eta": 0.2}, {"ar_alpha": 0.0}, {"lopti_order": "high_first"}, {"temperature": 1.0}],
    ids=str,
)
def test_the_comparison_with_the_reference_notices_a_wrong_setting(
    make_trainer, model_dir, wrong, optim
):
    method = Method(alpha=0.3, eta=0.5, temperature=0.7)
    ours, theirs = run_both(make_trainer, model_dir, method, optim, accumulation=1, **wrong)
    assert max_difference(ours, theirs) > 10 * TOLERANCE[optim]


def test_the_schedules_and_orders_differ_from_one_another(make_trainer, model_dir):
    runs = [
        run_both(
            make_trainer,
            model_dir,
            Method(eta=0.5, order=order, schedule=schedule),
            "sgd",
            accumulation=1,
        )[0]
        for order, schedule in itertools.product(
            ("low_first", "high_first"), ("batch", "minibatch")
        )
    ]
    for a, b in itertools.combinations(runs, 2):
        assert max_difference(a, b) > 1e-4
