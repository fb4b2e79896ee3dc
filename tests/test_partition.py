"""Level 4: at fixed parameters the phases' gradients add up to GRPO's, for every loss of TRL."""

import functools
import itertools

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, set_seed

LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo", "luspo"]


@pytest.fixture
def rollout(rollout):
    """Longer and warmer rollouts than elsewhere: both phases get tokens that clipping spares."""
    return functools.partial(rollout, max_completion_length=24, temperature=1.0)


def perturb(model):
    """Move the policy away from pi_old, so that ratios differ from 1 and clipping acts."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.02 * torch.randn(p.shape, generator=generator)


def gradient(trainer, inputs) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, inputs).backward()
    grads = [p.grad for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in grads if g is not None])


def phase_gradients(trainer, inputs) -> dict[str, torch.Tensor]:
    """Gradient of each phase, at the micro-step where the schedule puts it."""
    gradients = {}
    for step in (0, trainer.args.steps_per_generation):
        trainer._step = step
        gradients[trainer._micro_step().phase] = gradient(trainer, inputs)
    return gradients


def whole_gradient(trainer, inputs) -> torch.Tensor:
    eta, quantile = trainer.args.lopti_eta, trainer.args.lopti_quantile
    trainer.args.lopti_eta = trainer.args.lopti_quantile = None
    whole = gradient(trainer, inputs)
    trainer.args.lopti_eta, trainer.args.lopti_quantile = eta, quantile
    return whole


def assert_partition(trainer, inputs):
    parts, whole = phase_gradients(trainer, inputs), whole_gradient(trainer, inputs)
    error = (parts["low"] + parts["high"] - whole).norm() / whole.norm()
    assert error <= 1e-6, float(error)
    for part in parts.values():  # neither phase is empty: the split is real
        assert part.norm() > 0.01 * whole.norm()


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("threshold", [{"lopti_eta": 0.5}, {"lopti_quantile": 0.5}])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_phases_add_up_to_the_whole_gradient(rollout, loss_type, threshold, alpha):
    trainer, inputs = rollout(loss_type=loss_type, beta=0.04, ar_alpha=alpha, **threshold)
    perturb(trainer.model)
    for level, beta, corrected, entropy_coef in itertools.product(
        ("token", "sequence"), (0.0, 0.04), (False, True), (0.0, 0.1)
    ):
        if beta == 0 and corrected:
            continue  # there is no KL term to correct
        trainer.importance_sampling_level = level
        trainer.beta = beta
        trainer.args.use_bias_correction_kl = corrected
        trainer.entropy_coef = entropy_coef
        trainer._entropy_bonus_enabled = entropy_coef != 0
        assert_partition(trainer, inputs)


@pytest.mark.parametrize("options", [{"top_entropy_quantile": 0.9}, {"delta": 1.5}])
def test_phases_add_up_with_trl_options_that_touch_tokens(rollout, options):
    trainer, inputs = rollout(lopti_eta=0.5, ar_alpha=0.3, **options)
    perturb(trainer.model)
    assert_partition(trainer, inputs)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_phases_add_up_under_lora_and_gradient_checkpointing(rollout, beta):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer, inputs = rollout(
        lopti_eta=0.5, ar_alpha=0.3, beta=beta, peft_config=lora, activation_checkpointing=True
    )
    perturb(trainer.model)
    assert_partition(trainer, inputs)


def test_the_router_loss_acts_once_and_not_once_a_phase(rollout, tokenizer):
    config = Qwen2MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    set_seed(0)
    trainer, inputs = rollout(
        model=Qwen2MoeForCausalLM(config), lopti_eta=0.5, router_aux_loss_coef=5.0
    )
    assert trainer.aux_loss_enabled
    assert_partition(trainer, inputs)
    with_router = phase_gradients(trainer, inputs)
    trainer.aux_loss_enabled = False
    without_router = phase_gradients(trainer, inputs)
    assert torch.equal(with_router["high"], without_router["high"])
    assert (with_router["low"] - without_router["low"]).norm() > with_router["high"].norm()


def test_bands_add_up_to_the_whole_gradient(rollout):
    trainer, inputs = rollout(prob_band=[0.0, 1.0], beta=0.04)
    perturb(trainer.model)
    whole = gradient(trainer, inputs)
    total = torch.zeros_like(whole)
    for band in ([0.0, 0.25], [0.25, 0.5], [0.5, 0.75], [0.75, 1.0]):
        trainer.args.prob_band = band
        total += gradient(trainer, {**inputs, **trainer._memberships(inputs)})
    assert (total - whole).norm() <= 1e-6 * whole.norm()


def test_band_and_phase_intersect(rollout):
    trainer, inputs = rollout(prob_band=[0.0, 0.3], lopti_eta=0.5, ar_alpha=0.3)
    parts = phase_gradients(trainer, inputs)
    assert parts["low"].norm() > 0
    assert parts["high"].norm() == 0  # no token has pi <= 0.3 and pi >= 0.5


def test_a_micro_batch_without_tokens_of_the_phase_gives_a_zero_gradient(rollout):
    trainer, inputs = rollout(lopti_eta=1e-30)
    assert not inputs["low_prob_mask"].any()
    parts = phase_gradients(trainer, inputs)
    assert parts["low"].numel() == parts["high"].numel()  # every parameter has a gradient: DDP
    assert not parts["low"].any()
    torch.testing.assert_close(parts["high"], whole_gradient(trainer, inputs), rtol=0, atol=0)
