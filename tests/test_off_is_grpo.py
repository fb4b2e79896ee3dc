"""Level 4: with every method off the trainer is TRL's, bit for bit."""

import pytest
import torch
from conftest import letters_reward
from trl import GRPOConfig, GRPOTrainer

from lopti_trl import LoptiGRPOTrainer

WALL_CLOCK = (
    "step_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "eval_model_preparation_time",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)


def metrics(trainer) -> list[dict]:
    return [
        {k: v for k, v in row.items() if k not in WALL_CLOCK} for row in trainer.state.log_history
    ]


def assert_same_training(ours, theirs):
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    states = ours.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        for name in states[0][key]:
            assert torch.equal(states[0][key][name], states[1][key][name]), (key, name)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_off_trains_and_logs_as_grpo(make_trainer, loss_type, beta):
    runs = []
    for trainer_class in (LoptiGRPOTrainer, GRPOTrainer):
        trainer = make_trainer(trainer_class, loss_type=loss_type, beta=beta, max_steps=6)
        before = [p.clone() for p in trainer.model.parameters()]
        trainer.train()
        assert any(
            not torch.equal(p, q) for p, q in zip(before, trainer.model.parameters(), strict=True)
        )
        runs.append(trainer)
    assert_same_training(*runs)
    ours, theirs = map(metrics, runs)
    counts = [row.pop("rollout_batches", None) for row in ours]
    assert counts == [1, 1, 2, 2, 3, 3, None]  # the one metric we add; the last row is TRL's total
    assert ours == theirs


def test_a_plain_grpo_config_means_off_and_is_left_alone(make_trainer, model_dir, tokenizer):
    theirs = make_trainer(GRPOTrainer, max_steps=3)
    theirs.train()
    ours = LoptiGRPOTrainer(
        model_dir,
        letters_reward,
        theirs.args,
        train_dataset=theirs.train_dataset,
        processing_class=tokenizer,
    )
    ours.train()
    assert_same_training(ours, theirs)
    assert type(theirs.args) is GRPOConfig


def test_evaluation_is_plain_grpo_whatever_the_methods(make_trainer):
    results = []
    for trainer_class, methods in (
        (LoptiGRPOTrainer, {"ar_alpha": 0.9, "lopti_eta": 0.5, "prob_band": [0.0, 0.5]}),
        (GRPOTrainer, {}),
    ):
        trainer = make_trainer(trainer_class, per_device_eval_batch_size=4, **methods)
        torch.manual_seed(5)
        results.append(trainer.evaluate(trainer.train_dataset.select(range(4))))
    ours, theirs = ({k: v for k, v in r.items() if k not in WALL_CLOCK} for r in results)
    assert ours == theirs
