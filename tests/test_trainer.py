"""Level 4: what the trainer does at each step, on a tiny model."""

import pytest
import torch
from conftest import PROMPTS
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer

from lopti_trl import LoptiGRPOTrainer


class SpyTrainer(LoptiGRPOTrainer):
    """Records slice, phase and old log-probs of every micro-step."""

    def _compute_loss(self, model, inputs):
        slices = [i for i, s in enumerate(self._buffered_inputs) if s is inputs]
        trainable = self._trainable_tokens(inputs) if self.args.uses_lopti else None
        self.__dict__.setdefault("micro_steps", []).append((*slices, trainable, inputs))
        return super()._compute_loss(model, inputs)


def steps_of(trainer) -> list[str]:
    """Phase of each optimizer step, read off the metrics that the step logged."""
    return [
        next(k.split("/")[1] for k in row if k.startswith("lopti/") and k.endswith("/grad_norm"))
        for row in trainer.state.log_history
        if "loss" in row
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["low", "low", "high", "high"] * 2),
        ({"lopti_schedule": "minibatch"}, ["low", "high", "low", "high"] * 2),
        ({"lopti_order": "high_first"}, ["high", "high", "low", "low"] * 2),
        ({"num_iterations": 2}, ["low", "low", "high", "high"] * 2),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_optimizer_steps_go_through_the_phases_in_order(
    make_trainer, fields, expected, accumulation
):
    trainer = make_trainer(
        SpyTrainer,
        lopti_eta=0.5,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=2 * accumulation,
        max_steps=8,
        **fields,
    )
    trainer.train()
    assert steps_of(trainer) == expected
    # the tokens that trained are those of the phase, and every slice is swept once a phase
    micro_steps = trainer.micro_steps
    assert len(micro_steps) == 8 * accumulation
    for i, (_, trainable, inputs) in enumerate(micro_steps):
        low = inputs["low_prob_mask"]
        high = inputs["completion_mask"].bool() & ~low
        assert torch.equal(trainable, low if expected[i // accumulation] == "low" else high)
    for phase in ("low", "high"):
        swept = [m[0] for i, m in enumerate(micro_steps) if expected[i // accumulation] == phase]
        assert swept == list(range(2 * accumulation)) * 2


def test_old_log_probs_are_those_of_the_rollout_in_both_phases(make_trainer):
    trainer = make_trainer(SpyTrainer, lopti_eta=0.5, temperature=0.7, max_steps=4)
    policy = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.train()
    low, high = trainer.micro_steps[:2], trainer.micro_steps[2:]
    for (_, _, first), (_, _, second) in zip(low, high, strict=True):
        assert torch.equal(first["old_per_token_logps"], second["old_per_token_logps"])
    # and they are those of the initial policy, at the sampling temperature
    trainer.model.load_state_dict(policy)
    for _, _, inputs in low:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            logits = trainer.model(input_ids=ids, attention_mask=mask).logits
        logits = logits[:, inputs["prompt_ids"].size(1) - 1 : -1]
        valid = inputs["completion_mask"].bool()
        targets = inputs["completion_ids"].unsqueeze(2)
        for temperature, same in ((0.7, True), (1.0, False)):
            probs = torch.softmax(logits / temperature, dim=-1).gather(2, targets).squeeze(2)
            close = torch.allclose(
                probs[valid], inputs["old_per_token_logps"].exp()[valid], atol=1e-5
            )
            assert close is same


def test_the_ratio_starts_at_one_and_has_moved_by_the_second_phase(make_trainer):
    trainer = make_trainer(lopti_eta=0.5, max_steps=4)
    trainer.train()
    logs = trainer.state.log_history
    assert logs[0]["lopti/low/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert abs(logs[2]["lopti/high/ratio_mean"] - 1) > 1e-3
    assert logs[0]["lopti/low/clip_ratio"] == 0


def test_phase_metrics_equal_their_definition(make_trainer):
    trainer = make_trainer(SpyTrainer, lopti_eta=0.5, ar_alpha=0.3, max_steps=4, learning_rate=0.05)
    recorded = []

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            grads = [p.grad.flatten() for p in model.parameters()]
            recorded.append(torch.cat(grads).norm().item())

    trainer.add_callback(Recorder())
    trainer.args.max_grad_norm = 0  # so that the callback sees the norm that is logged
    trainer.train()
    for row, norm, phase in zip(
        trainer.state.log_history, recorded, ["low", "low", "high", "high"], strict=False
    ):
        assert row[f"lopti/{phase}/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert row[f"lopti/{phase}/loss"] == pytest.approx(row["loss"], rel=1e-6)
    first = trainer.state.log_history[0]
    inputs = [m[2] for m in trainer.micro_steps[:2]]
    low = sum(i["low_prob_mask"].sum().item() for i in inputs)
    valid = sum(i["completion_mask"].sum().item() for i in inputs)
    assert first["lopti/low_fraction"] == pytest.approx(low / valid)
    weights = sum(
        ((0.3 * i["old_per_token_logps"].exp() + 0.7) * i["completion_mask"]).sum().item()
        for i in inputs
    )
    assert first["ar/weight_mean"] == pytest.approx(weights / valid, rel=1e-5)


def test_clip_ratio_counts_the_tokens_of_the_phase_whose_gradient_clipping_removed(make_trainer):
    class LogpsSpy(SpyTrainer):
        def _log_scored(self, inputs, loss):
            ratio = (self._scored.logps - inputs["old_per_token_logps"]).exp()
            advantages = inputs["advantages"][:, None].expand_as(ratio)
            expected = 0
            in_phase = self._scored.gate
            for row, col in in_phase.nonzero().tolist():
                r, a = ratio[row, col].item(), advantages[row, col].item()
                expected += (a > 0 and r > 1.24) or (a < 0 and r < 0.8)
            self.__dict__.setdefault("expected", []).append(expected / in_phase.sum().item())
            super()._log_scored(inputs, loss)

    trainer = make_trainer(LogpsSpy, lopti_eta=0.5, max_steps=4, learning_rate=0.05)
    trainer.train()
    logged = [
        row[f"lopti/{phase}/clip_ratio"]
        for row, phase in zip(trainer.state.log_history, steps_of(trainer), strict=False)
    ]
    assert logged == pytest.approx(trainer.expected)
    assert max(logged) > 0.1


@pytest.mark.parametrize("loss_type", ["sapo", "vespo"])
def test_losses_that_do_not_clip_report_no_clip_ratio(make_trainer, loss_type):
    trainer = make_trainer(lopti_eta=0.5, loss_type=loss_type, max_steps=2)
    trainer.train()
    assert "lopti/low/ratio_mean" in trainer.state.log_history[0]
    assert not any("clip_ratio" in k for row in trainer.state.log_history for k in row)


@pytest.mark.parametrize("fields", [{}, {"lopti_eta": 0.5}, {"num_iterations": 2}])
def test_rollout_batches_are_counted(make_trainer, fields):
    passes = 1 if not fields else 2
    trainer = make_trainer(max_steps=4 * passes, **fields)
    trainer.train()
    counts = [row["rollout_batches"] for row in trainer.state.log_history if "loss" in row]
    assert counts == [1] * 2 * passes + [2] * 2 * passes


def test_an_epoch_holds_the_same_rollouts_and_twice_the_steps_under_lopti(make_trainer):
    steps, tokens = {}, {}
    for eta in (None, 0.5):
        trainer = make_trainer(lopti_eta=eta, num_train_epochs=1, learning_rate=0.0)
        trainer.train()
        steps[eta] = trainer.state.global_step
        tokens[eta] = [r["num_tokens"] for r in trainer.state.log_history if "num_tokens" in r]
    assert steps[0.5] == 2 * steps[None] == 64
    assert tokens[0.5] == tokens[None]  # nothing is learned: the same prompts, the same rollouts


def test_every_valid_token_is_in_one_phase_whatever_the_micro_batch_size(make_trainer):
    counts = set()
    for batch_size, accumulation in ((1, 1), (1, 8), (2, 2), (4, 1), (8, 1)):
        trainer = make_trainer(
            lopti_eta=0.5,
            per_device_train_batch_size=batch_size,
            steps_per_generation=8 // batch_size,
            gradient_accumulation_steps=accumulation,
        )
        trainer.model.train()
        trainer._prepare_inputs([{"prompt": p} for p in PROMPTS[:2] for _ in range(4)])
        num_low = num_high = 0
        for inputs in trainer._buffered_inputs:
            tokens = []
            for step in (0, trainer.args.steps_per_generation):
                trainer._step = step
                tokens.append(trainer._trainable_tokens(inputs).int())
            assert torch.equal(tokens[0] + tokens[1], inputs["completion_mask"].int())
            num_low += tokens[0].sum().item()
            num_high += tokens[1].sum().item()
        counts.add((num_low, num_high))
    assert len(counts) == 1  # the same rollout, the same membership
    assert min(counts.pop()) > 0


def test_tokens_that_a_tool_wrote_are_in_no_phase(make_trainer):
    trainer = make_trainer(lopti_eta=0.5, prob_band=[0.0, 1.0])
    rollout = {
        "old_per_token_logps": torch.tensor([[0.1, 0.9, 0.2, 0.8, 1.0]]).log(),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0, 0, 1]]),
    }
    inputs = {**rollout, **trainer._memberships(rollout)}
    for step, expected in ((0, [1, 0, 0, 0, 0]), (2, [0, 1, 0, 0, 0])):
        trainer._step = step
        assert trainer._trainable_tokens(inputs).int().tolist() == [expected]
    assert trainer._metrics["train"]["lopti/low_fraction"] == [0.5]


def test_quantile_mode_isolates_that_share_of_the_tokens(make_trainer):
    trainer = make_trainer(
        SpyTrainer, lopti_quantile=0.3, max_steps=4, max_completion_length=32, temperature=1.0
    )
    trainer.train()
    first = trainer.state.log_history[0]
    inputs = [m[2] for m in trainer.micro_steps[:2]]
    probs = torch.cat([i["old_per_token_logps"].exp()[i["completion_mask"].bool()] for i in inputs])
    assert first["lopti/eta"] == pytest.approx(torch.quantile(probs, 0.3).item())
    assert first["lopti/low_fraction"] == pytest.approx(0.3, abs=1 / len(probs))


@pytest.mark.parametrize("fields", [{"ar_alpha": 0.3}, {"prob_band": [0.0, 0.5]}])
def test_old_log_probs_are_there_even_when_generation_and_update_are_aligned(make_trainer, fields):
    trainer = make_trainer(SpyTrainer, steps_per_generation=1, max_steps=2, **fields)
    trainer.train()
    assert all("old_per_token_logps" in inputs for _, _, inputs in trainer.micro_steps)
    assert trainer.num_iterations == 1


def test_ar_at_alpha_one_weighs_the_advantages_by_pi(rollout, monkeypatch):
    trainer, inputs = rollout(ar_alpha=1.0)
    seen = {}
    compute_loss = GRPOTrainer._compute_loss

    def spy(self, model, inputs):
        seen.update(inputs)
        return compute_loss(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", spy)
    trainer._compute_loss(trainer.model, inputs)
    expected = inputs["old_per_token_logps"].exp() * inputs["advantages"][:, None]
    assert torch.equal(seen["advantages"], expected)
    assert inputs["advantages"].ndim == 1  # the buffer is left alone


def test_a_reward_that_raises_is_named(make_trainer):
    def broken_reward(completions, **kwargs):
        return [1 / 0 for _ in completions]

    trainer = make_trainer(max_steps=1)
    trainer.reward_funcs, trainer.reward_func_names = [broken_reward], ["broken_reward"]
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.train()
    assert "broken_reward" in raised.value.__notes__[0]


def test_a_reward_of_the_wrong_length_is_named(make_trainer):
    trainer = make_trainer(max_steps=1)
    trainer.reward_funcs = [lambda completions, **kwargs: [0.0]]
    trainer.reward_func_names = ["short_reward"]
    with pytest.raises(ValueError, match="'short_reward' returned 1 rewards, but 8"):
        trainer.train()


def test_every_method_at_once_trains_with_lora_and_checkpointing(make_trainer):
    trainer = make_trainer(
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        activation_checkpointing=True,
        ar_alpha=0.3,
        lopti_quantile=0.5,
        prob_band=[0.0, 0.9],
        lopti_schedule="minibatch",
        beta=0.04,
        num_iterations=2,
        max_steps=8,
    )
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert changed == {n for n, p in trainer.model.named_parameters() if p.requires_grad}
