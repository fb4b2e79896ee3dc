"""Level 4: dynamic importance weighting in the trainer, on a random tiny model."""

import functools
import inspect
import math

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from lopti_trl import LoptiGRPOConfig, LoptiGRPOTrainer
from lopti_trl.diw import find_symptoms, last_block_parameters
from lopti_trl.weights import (
    ar_weights,
    diw_weights,
    effective_sample_ratio,
    energy_deviation,
    sequence_softmax,
)

INFINITE = {"diw_xi_start": math.inf, "diw_xi_end": math.inf}
FIXED = {"diw_xi_start": 1.5, "diw_xi_end": 1.5}
LEARNT = {"diw": True, "diw_softmax": "ratio", "diw_tau": 0.7, "diw_learn_tau": True}
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
SHORT = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}


@pytest.fixture
def rollout(rollout):
    """Longer and warmer rollouts than elsewhere, of a policy that has left its reference."""

    def make(scale=0.02, **args):
        trainer, inputs = rollout(**{"max_completion_length": 24, "temperature": 1.0, **args})
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in trainer.model.parameters():
                if p.requires_grad:
                    p += scale * torch.randn(p.shape, generator=generator)
        return trainer, inputs

    return make


def parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same(ours: dict, theirs: dict):
    assert ours.keys() == theirs.keys()
    assert all(value.isfinite().all() for value in theirs.values())
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def difference(ours: dict, theirs: dict) -> float:
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def trained(trainer) -> dict[str, torch.Tensor]:
    trainer.train()
    return parameters(trainer)


def gradient(trainer, inputs) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, inputs).backward()
    grads = [p.grad for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in grads])


def policy_logps(trainer, inputs) -> torch.Tensor:
    """log pi_theta of the completion, by the plain model."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logps = (logits / trainer.temperature).log_softmax(-1)
    width = inputs["completion_ids"].size(1)
    return logps.gather(2, ids[:, 1:, None]).squeeze(2)[:, -width:]


# Against plain GRPO


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_without_cap_at_the_reference_it_is_grpo_to_the_bit(make_trainer, beta):
    """The reference shares the policy's weights, so that they agree at every rollout."""
    plain = make_trainer(GRPOTrainer, beta=beta, max_steps=6)
    if beta:
        plain.ref_model = plain.model
    expected = trained(plain)
    ours = make_trainer(diw=True, diw_policy="rollout", beta=beta, max_steps=6, **INFINITE)
    ours.ref_model = ours.model
    assert_same(trained(ours), expected)


def test_weights_of_the_current_policy_start_at_one_up_to_rounding(rollout):
    """TRL scores policy and reference in batches of their own, so that bits may differ."""
    trainer, inputs = rollout(scale=0.0, diw=True, **INFINITE)
    weighted = gradient(trainer, inputs)
    trainer.args.diw = False
    plain = gradient(trainer, inputs)
    assert (weighted - plain).norm() <= 2e-6 * plain.norm()


def test_an_infinite_temperature_is_grpo_to_the_bit_though_policy_and_reference_differ(
    make_trainer,
):
    expected = trained(make_trainer(GRPOTrainer, max_steps=6))
    fields = {"diw": True, "diw_softmax": "ratio", "max_steps": 6}
    assert_same(trained(make_trainer(diw_tau=math.inf, **fields)), expected)
    distances = [
        difference(trained(make_trainer(diw_tau=tau, **fields)), expected) for tau in (1e6, 1.0)
    ]
    assert distances[0] < 1e-4 < distances[1]


def test_off_builds_no_reference_and_on_does_so_without_a_kl_term(make_trainer):
    assert make_trainer().ref_model is None
    assert make_trainer(diw=True, diw_reference="rollout").ref_model is None
    trainer = make_trainer(diw=True, max_steps=2)
    assert trainer.ref_model is not None
    assert trainer.beta == trainer.args.beta == 0.0
    initial = parameters(trainer)
    trainer.train()
    assert "kl" not in trainer.state.log_history[0]
    assert difference(parameters(trainer), initial) > 1e-3
    reference = {name: p.detach() for name, p in trainer.ref_model.named_parameters()}
    assert_same(reference, initial)


# The weights in the loss


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"diw_mode": "zero"},
        {"diw_policy": "rollout"},
        {"diw_reference": "rollout"},
        {"diw_softmax": "ratio", "diw_tau": 0.3},
        {"diw_softmax": "log_ratio", "diw_r_max": 1.5},
        {"diw_energy_beta": 0.1, "diw_energy_lambda": 0.5},
        {"ar_alpha": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("pure", [False, True])
def test_the_gradient_is_that_of_the_weighted_objective(rollout, options, pure):
    """Against an objective written out here: token mean of -w A ratio, or of -w A log pi."""
    trainer, inputs = rollout(diw=True, diw_pure=pure, loss_type="bnpo", **FIXED, **options)
    trainer.epsilon_low, trainer.epsilon_high = 1.0, 1e9  # clipping has its own tests
    if options.get("diw_policy") == "rollout":  # which is the reference's at first
        inputs = {**inputs, "ref_per_token_logps": inputs["ref_per_token_logps"] - 0.3}
    ours = gradient(trainer, inputs)

    logps, mask = policy_logps(trainer, inputs), inputs["completion_mask"]
    old = inputs["old_per_token_logps"]
    ref = inputs.get("ref_per_token_logps", old)
    advantages = inputs["advantages"][:, None].expand_as(logps)
    advantages = advantages * ar_weights(old.exp(), options.get("ar_alpha", 0.0))
    numerator = old if options.get("diw_policy") == "rollout" else logps
    denominator = old if options.get("diw_reference") == "rollout" else ref
    deviation = energy_deviation(logps, ref, mask, 1.5, options.get("diw_energy_lambda", 1.0))
    advantages = advantages - options.get("diw_energy_beta", 0.0) * deviation
    weights = diw_weights(
        numerator,
        denominator,
        1.5,
        options.get("diw_mode", "cap"),
        advantages,
        options.get("diw_r_max"),
        options.get("diw_softmax", "off"),
        options.get("diw_tau", 1.0),
        mask,
    )
    term = logps if pure else (logps - old).exp()
    trainer.model.zero_grad()
    (-(weights * advantages * term * mask).sum() / mask.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert (weights * mask).std() > 0.01  # the weights are at work
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


def test_clipping_sees_the_ratio_and_not_the_weight(rollout):
    trainer, inputs = rollout(diw=True, loss_type="bnpo", **FIXED)
    ours = gradient(trainer, inputs)
    logps, mask = policy_logps(trainer, inputs), inputs["completion_mask"]
    ratio = (logps - inputs["old_per_token_logps"]).exp()
    advantages = inputs["advantages"][:, None]
    weights = diw_weights(logps, inputs["ref_per_token_logps"], 1.5)
    clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.24) * advantages)
    trainer.model.zero_grad()
    (-(weights * clipped * mask).sum() / mask.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert (ours - expected).norm() <= 1e-5 * expected.norm()
    assert ((ratio > 1.24) & (advantages > 0) & (mask > 0)).any()


@pytest.mark.parametrize("options", [{}, {"diw_softmax": "ratio"}, {"diw_pure": True}], ids=str)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_phases_of_lopti_add_up_to_the_whole_weighted_gradient(rollout, loss_type, options):
    trainer, inputs = rollout(
        diw=True, lopti_eta=0.5, ar_alpha=0.3, beta=0.04, loss_type=loss_type, **options
    )
    parts = []
    for step in (0, trainer.args.steps_per_generation):
        trainer._step = step
        parts.append(gradient(trainer, inputs))
    trainer.args.lopti_eta = None
    whole = gradient(trainer, inputs)
    assert min(part.norm() for part in parts) > 0.01 * whole.norm()
    assert (sum(parts) - whole).norm() <= 1e-6 * whole.norm()


def test_micro_batches_and_update_tricks_change_nothing(make_trainer):
    """Weights, metrics and tau of an optimizer step do not depend on how its rows are split."""
    fields = {**LEARNT, "loss_type": "dapo", "max_steps": 6}
    whole = make_trainer(per_device_train_batch_size=8, steps_per_generation=1, **fields)
    expected = trained(whole)
    for tricks in (False, True):
        chosen = {"update_skip": False, "update_cut": False, "update_project": False}
        split = make_trainer(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            steps_per_generation=2,
            tricks=tricks,
            **fields,
            **chosen,
        )
        assert difference(trained(split), expected) < 1e-4
        for ours, theirs in zip(split.state.log_history, whole.state.log_history, strict=True):
            shared = {k for k in theirs if k.startswith("diw/")}
            assert {k: ours[k] for k in shared} == pytest.approx(
                {k: theirs[k] for k in shared}, rel=1e-4, abs=1e-5
            )


def test_the_metrics_describe_the_weights(rollout):
    trainer, inputs = rollout(diw_softmax="ratio", diw_tau=0.5, diw=True, diw_r_max=1.4, **FIXED)
    inputs["advantages"][0] = 0.0  # left out of the metrics
    trainer._compute_loss(trainer.model, inputs)
    trainer._end_step()
    logged = {k: v[0] for k, v in trainer._metrics["train"].items() if k.startswith("diw/")}
    log_r = policy_logps(trainer, inputs).detach() - inputs["ref_per_token_logps"]
    mask = inputs["completion_mask"].bool()
    kept = mask & (log_r.abs() <= math.log(1.4))
    weights = sequence_softmax(log_r.exp().clamp(max=1.5), kept, 0.5).clamp(max=1.5)
    counted = mask & (inputs["advantages"] != 0)[:, None]
    ess = effective_sample_ratio(weights, kept & counted)
    expected = {
        "diw/xi": 1.5,
        "diw/tau": 0.5,
        "diw/weight_mean": weights[counted].mean().item(),
        "diw/weight_std": weights[counted].std(correction=0).item(),
        "diw/capped_fraction": (log_r.exp() > 1.5)[counted].float().mean().item(),
        "diw/filtered_fraction": (~kept)[counted].float().mean().item(),
        "diw/ess": ess[(kept & counted).any(1)].mean().item(),
    }
    assert logged == pytest.approx(expected, rel=1e-4)
    assert expected["diw/capped_fraction"] > 0
    assert expected["diw/filtered_fraction"] > 0.1


def test_xi_follows_its_schedule_over_the_run(make_trainer):
    trainer = make_trainer(diw=True, diw_xi_begin=1, max_steps=5)
    trainer.train()
    logged = [row["diw/xi"] for row in trainer.state.log_history if "diw/xi" in row]
    assert logged == pytest.approx([1.8, 1.8, 1.65, 1.5, 1.35])


def test_half_precision_training_has_finite_float32_weights(make_trainer):
    trainer = make_trainer(diw=True, bf16=True, max_steps=4)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "diw/weight_std" in row]
    assert len(rows) == 4
    assert rows[0]["diw/weight_mean"] == pytest.approx(1.0, abs=1e-3)
    assert 0.01 < rows[-1]["diw/weight_std"] < 2


# The reference


def test_a_model_in_memory_gets_a_copy_of_itself_and_not_what_its_path_holds(
    make_trainer, model_dir
):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        model.model.norm.weight += 0.5
    trainer = make_trainer(model=model, diw=True)
    reference = trainer.ref_model.model.norm.weight
    assert torch.equal(reference, model.model.norm.weight)
    assert reference.data_ptr() != model.model.norm.weight.data_ptr()
    model.config._name_or_path = ""  # as of a model that was never saved
    trainer = make_trainer(model=model, diw=True, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["diw/weight_std"] < 1e-5


def test_lora_takes_the_base_model_as_its_reference(make_trainer):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(diw=True, peft_config=lora, max_steps=4)
    assert trainer.ref_model is None
    trainer.train()
    spreads = [row["diw/weight_std"] for row in trainer.state.log_history[:-1]]
    assert spreads[0] < 1e-5
    assert spreads[-1] > 1e-3


# Exact resume


@pytest.mark.parametrize(
    "method",
    [
        LEARNT,
        {**LEARNT, "lopti_eta": 0.5, "diw_softmax": "log_ratio"},
        {"diw": True, "diw_warmup": True, "diw_warmup_steps": 3, "diw_energy_beta": 0.1},
    ],
    ids=["tau", "tau and Lopti", "warm-up"],
)
def test_resuming_from_any_step_ends_with_the_same_bits(make_trainer, method):
    fields = {**method, **EVERY_STEP, "max_steps": 6}
    whole = make_trainer(**fields)
    expected = trained(whole)
    for step in range(1, 6):
        resumed = make_trainer(**{**fields, "save_strategy": "no"})
        torch.manual_seed(step)  # whatever state the new process starts in
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{step}")
        assert_same(parameters(resumed), expected)
        ours, theirs = (
            [{k: v for k, v in row.items() if k.startswith("diw/")} for row in t.state.log_history]
            for t in (resumed, whole)
        )
        assert ours == theirs
        if resumed._temperature is not None:
            assert torch.equal(resumed._temperature.rho, whole._temperature.rho)
    if whole._temperature is not None:
        taus = [row["diw/tau"] for row in whole.state.log_history if "diw/tau" in row]
        assert len(set(taus)) == 5  # at the reference no weight depends on it; then it moves


def test_changed_weights_are_refused_inside_a_rollout_batch(make_trainer):
    whole = make_trainer(diw=True, **EVERY_STEP, max_steps=2)
    whole.train()
    changed = make_trainer(diw=True, diw_xi_start=1.5, max_steps=2)
    with pytest.raises(ValueError, match=r"changed settings \(diw_xi_start: 1\.8 -> 1\.5\)"):
        changed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-1")


# Warm-up of the last block

LAST_BLOCK = {"model.layers.1", "model.norm", "lm_head"}


def test_the_last_block_is_the_last_layer_the_final_norm_and_an_untied_head(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    names = {name for name, _ in model.named_parameters()}
    chosen = last_block_parameters(model)
    assert chosen == {
        n for n in names if n.startswith(("model.layers.1.", "model.norm", "lm_head"))
    }
    assert "lm_head.weight" in chosen
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert last_block_parameters(model) == chosen - {"lm_head.weight"}


class WarmupSpy(LoptiGRPOTrainer):
    """Keeps the parameters after every optimizer step, and which ones the optimizer has met."""

    def training_step(self, model, inputs, num_items_in_batch):
        self.history = [*getattr(self, "history", []), parameters(self)]
        self.met = [*getattr(self, "met", []), len(self.optimizer.state)]
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"lopti_eta": 0.5}])
def test_the_warm_up_freezes_exactly_what_it_says(make_trainer, options):
    accumulation = options.get("gradient_accumulation_steps", 1)
    trainer = make_trainer(
        WarmupSpy, diw=True, diw_warmup=True, diw_warmup_steps=3, max_steps=5, weight_decay=0.1,
        **options,
    )  # fmt: skip
    trainer.train()
    initial, chosen = trainer.history[0], trainer._last_block
    for micro_step, state in enumerate([*trainer.history, parameters(trainer)]):
        step = micro_step // accumulation
        moved = {name for name in initial if not torch.equal(state[name], initial[name])}
        assert moved == (set() if step == 0 else chosen if step <= 3 else set(initial))
    assert trainer.met[::accumulation] == [0] + [len(chosen)] * 3 + [len(initial)]
    steps = {
        name: trainer.optimizer.state[p]["step"].item()
        for name, p in trainer.model.named_parameters()
    }
    assert steps == {name: 5 if name in chosen else 2 for name in initial}


def test_after_the_warm_up_the_optimizer_takes_a_first_step(make_trainer):
    """Adam's first step has the size of the learning rate: its averages were not diluted."""
    trainer = make_trainer(
        WarmupSpy, diw=True, diw_warmup=True, diw_warmup_steps=3, max_steps=4, weight_decay=0.0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.train()
    before, after = trainer.history[3], parameters(trainer)
    for name in set(before) - trainer._last_block:
        step = (after[name] - before[name]).abs()
        assert step.max().item() == pytest.approx(1e-2, rel=1e-3), name


def test_the_gradient_norm_of_the_warm_up_is_that_of_the_last_block(make_trainer):
    """So clipping does not shrink the last block's step for the sake of gradients thrown away."""
    norms, logged = {}, {}
    for is_warm in (False, True):
        trainer = make_trainer(diw=True, diw_warmup=is_warm, max_grad_norm=1e9, max_steps=10)
        chosen = last_block_parameters(trainer.model)
        get_norm = trainer._get_grad_norm

        def spy(model, grad_norm=None, chosen=chosen, is_warm=is_warm, get_norm=get_norm):
            grads = [p.grad.norm() for n, p in model.named_parameters() if n in chosen]
            norms.setdefault(is_warm, torch.stack(grads).norm().item())
            return get_norm(model, grad_norm)

        trainer._get_grad_norm = spy
        trainer.train()
        logged[is_warm] = trainer.state.log_history[0]["grad_norm"]
    assert norms[True] == norms[False]
    assert logged[True] == pytest.approx(norms[True], rel=1e-6)
    assert logged[False] > 1.01 * norms[False]


@pytest.mark.parametrize(("steps", "length"), [(20, 2), (9, 0), (20_000, 1000)])
def test_the_warm_up_takes_a_tenth_of_the_steps_and_at_most_a_thousand(make_trainer, steps, length):
    trainer = make_trainer(diw=True, diw_warmup=True)
    trainer.state.max_steps = steps
    trainer.state.global_step = length
    assert not trainer._in_warmup
    trainer.state.global_step = length - 1
    assert trainer._in_warmup or length == 0


def test_the_warm_up_ends_early_when_the_spread_settles_and_stays_ended_after_a_resume(
    make_trainer,
):
    fields = {
        "diw": True, "diw_warmup": True, "diw_warmup_steps": 24, "diw_warmup_tolerance": 50.0,
        "save_strategy": "steps", "save_steps": 11, "max_steps": 23,
    }  # fmt: skip
    whole = make_trainer(**fields)
    expected = trained(whole)
    assert whole._warmup_end == 20
    logged = [row["diw/in_warmup"] for row in whole.state.log_history if "diw/xi" in row]
    assert logged == [1.0] * 20 + [0.0] * 3
    frozen = set(expected) - whole._last_block
    steps = {
        whole.optimizer.state[p]["step"].item()
        for n, p in whole.model.named_parameters()
        if n in frozen
    }
    assert steps == {3}
    for step in (11, 22):
        resumed = make_trainer(**{**fields, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{step}")
        assert_same(parameters(resumed), expected)


def test_the_warm_up_refuses_an_adapter(make_trainer):
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="diw_warmup=True trains the last block's own weights"):
        make_trainer(diw=True, diw_warmup=True, peft_config=lora)


# Warnings, entropy floor, RAFT


def test_few_sequences_a_step_are_warned_of_and_enough_are_not(make_trainer, caplog):
    make_trainer(diw=True, max_steps=1).train()
    assert "An optimizer step has 4 sequences; below 512" in caplog.text
    caplog.clear()
    make_trainer(max_steps=1).train()
    assert "sequences" not in caplog.text


def test_a_symptom_is_reported_once_with_its_remedy(make_trainer, caplog):
    trainer = make_trainer(diw=True, diw_xi_start=1.0, diw_xi_end=1.0, max_steps=16)
    trainer.train()
    assert "outputs too conservative" in {
        s.name for s in find_symptoms(trainer.state.log_history, 16)
    }
    assert caplog.text.count("outputs too conservative: xi holds back") == 1
    assert "raise diw_xi_end" in caplog.text


def test_the_entropy_floor_acts_below_it_and_not_above(make_trainer):
    """TRL's adaptive bonus: its coefficient grows while entropy is below the floor."""
    fields = {"diw": True, "use_adaptive_entropy": True, "entropy_coef": 0.0, "max_steps": 4}
    coefficients = {}
    for floor in (0.0, 100.0):
        trainer = make_trainer(entropy_target=floor, **fields)
        trainer.train()
        coefficients[floor] = [r["entropy_coef"] for r in trainer.state.log_history[:-1]]
    assert coefficients[0.0] == [0.0] * 4
    delta = trainer.args.entropy_coef_delta
    assert coefficients[100.0] == pytest.approx([delta, 2 * delta, 3 * delta, 4 * delta])


def test_raft_keeps_positive_advantages_as_ones(make_trainer):
    trainer = make_trainer(raft=True, max_steps=2, **SHORT)
    trainer.train()
    advantages = torch.cat([piece["advantages"] for piece in trainer._buffered_inputs])
    assert set(advantages.tolist()) == {0.0, 1.0}
    plain = make_trainer(max_steps=2, **SHORT)
    plain.train()
    rollout = torch.cat([piece["advantages"] for piece in plain._buffered_inputs])
    assert 0 < (rollout > 0).sum() == advantages.sum()


# Bad combinations


def config(**fields) -> LoptiGRPOConfig:
    defaults = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
    return LoptiGRPOConfig(**{**defaults, **fields})


ON = functools.partial(dict, diw=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (ON(diw_mode="x"), r"diw_mode='x' is unknown\. Use one of cap, zero"),
        (ON(diw_policy="old"), r"diw_policy='old' is unknown\. Use one of current, rollout"),
        (ON(diw_reference="x"), r"diw_reference='x' is unknown"),
        (ON(diw_softmax="x"), r"diw_softmax='x' is unknown\. Use one of off, ratio, log_ratio"),
        (ON(diw_xi_start=0.9), r"diw_xi_start=0\.9 .* at least 1.*Use 1\.5 to 2\.0"),
        (ON(diw_xi_end=0.5), r"diw_xi_end=0\.5 must be at least 1"),
        (ON(diw_xi_end=math.nan), r"diw_xi_end=nan must be at least 1"),
        (ON(diw_xi_start=math.inf), r"diw_xi_start=inf .* no straight line.*Set both to inf"),
        (ON(diw_xi_begin=-1), r"diw_xi_begin=-1 must be at least 0"),
        (ON(diw_xi_horizon=0), r"diw_xi_horizon=0 above 0"),
        (ON(diw_tau=0.1), r"diw_tau=0\.1 must be above diw_tau_min=0\.1"),
        (ON(diw_tau_min=0.0), r"diw_tau_min=0\.0, and that above 0"),
        (ON(diw_target_ess=1.0), r"diw_target_ess=1\.0 is outside \(0, 1\)"),
        (ON(diw_tau_learning_rate=0.0), r"diw_tau_learning_rate=0\.0 must be above 0"),
        (ON(diw_r_max=1.0), r"diw_r_max=1\.0 must be above 1.*None to keep every token"),
        (ON(diw_energy_beta=-1.0), r"diw_energy_beta=-1\.0 .* at least 0"),
        (ON(diw_warmup=True, diw_warmup_steps=0), r"diw_warmup_steps=0 must be above 0"),
        (ON(diw_warmup=True, diw_warmup_tolerance=0.0), r"diw_warmup_tolerance=0\.0 must be"),
        (ON(diw_warmup_steps=5), r"diw_warmup_steps=5 .* nothing without diw_warmup"),
        (ON(diw_warmup_tolerance=0.1), r"diw_warmup_tolerance=0\.1 do nothing without diw_warmup"),
        (ON(diw_policy="rollout", diw_reference="rollout"), r"divides pi_old by itself.*current"),
        (ON(diw_learn_tau=True), r"diw_learn_tau=True .* diw_softmax=off.*Set diw_softmax"),
        (
            ON(diw_learn_tau=True, diw_softmax="ratio", diw_tau=math.inf),
            r"diw_learn_tau=True .* diw_tau=inf",
        ),
        (ON(diw_pure=True, importance_sampling_level="sequence"), r"sequences\. Set it to token"),
        (ON(diw_pure=True, loss_type="cispo"), r"loss_type=cispo has none\. Use one of grpo, bnpo"),
        (ON(diw_pure=True, off_policy_mask_threshold=0.1), r"off_policy_mask_threshold=0\.1"),
        (ON(sync_ref_model=True, beta=0.1), r"sync_ref_model=True moves it\. Set it to false"),
        (ON(update_cut=True), r"update_cut=True would change the gradient"),
        (ON(diw_energy_beta=0.1, update_skip=True), r"update_skip=True would change the gradient"),
    ],
)
def test_bad_values_raise_and_name_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_idle_options_are_named_and_leave_grpo_alone(make_trainer, caplog):
    idle = {"diw_warmup": True, "diw_tau": 0.5, "diw_energy_beta": 0.1, "max_steps": 3}
    trainer = make_trainer(**idle)
    assert (
        "diw is false: diw_tau=0.5, diw_energy_beta=0.1, diw_warmup=True do nothing" in caplog.text
    )
    assert_same(trained(trainer), trained(make_trainer(GRPOTrainer, max_steps=3)))


def test_it_combines_with_the_other_methods():
    args = config(diw=True, ar_alpha=0.3, lopti_eta=0.5, diw_softmax="ratio", raft=True)
    assert args.uses_token_probs
    assert args.needs_reference
    assert args.update_tricks == {"trim", "balance", "skip"}
    assert not config(diw=True, diw_reference="rollout").needs_reference
    assert config(diw=True, diw_reference="rollout", diw_energy_beta=0.1).needs_reference


def test_trl_asks_for_beta_and_the_reference_where_we_think():
    """Raising beta while a rollout is scored makes reference log-probs and nothing else."""
    readers = {
        name: inspect.getsource(method).count("self.beta")
        for name, method in inspect.getmembers(GRPOTrainer, inspect.isfunction)
        if "self.beta" in inspect.getsource(method)
    }
    assert readers.keys() == {"__init__", "_generate_and_score_completions", "_compute_loss"}
    assert readers["_generate_and_score_completions"] == 1
    # the policy by its name, and the reference
    assert inspect.getsource(GRPOTrainer.__init__).count("create_model_from_path(") == 2


def test_trl_reads_the_advantages_after_it_scored_the_policy(rollout):
    """What the weights of the current policy lean on."""
    trainer, inputs = rollout()
    scored = []

    class Inputs(dict):
        def __getitem__(self, key):
            assert scored or key != "advantages", "read too early"
            return super().__getitem__(key)

        def get(self, key, default=None):
            assert scored or key != "old_per_token_logps", "read too early"
            return super().get(key, default)

    score = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: scored.append(1) or score(*a, **k)
    GRPOTrainer._compute_loss(trainer, trainer.model, Inputs(inputs))
    assert scored == [1]
