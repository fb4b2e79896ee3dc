"""Live diagnostics: equal to brute force, whatever the layout, and without effect on training."""

import itertools

import pytest
import torch
from conftest import PROMPTS
from peft import LoraConfig
from test_off_is_grpo import assert_same_training, metrics

from lopti_trl import LoptiGRPOConfig, LoptiGRPOTrainer
from lopti_trl.diagnostics import band_sums, logit_grad_norm, watched_rows
from lopti_trl.phases import prob_band_mask
from lopti_trl.update import valid_tokens

EDGES = [0.0, 0.25, 0.5, 0.75, 1.0]
BANDS = ["0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1"]
BOTH = {"ar_alpha": 0.3, "lopti_eta": 0.5}


def per_token_norms(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """||d log pi(id) / d logits|| of (N, V) logits, one backward pass a token."""
    norms = []
    for row, token in zip(logits.double(), ids, strict=True):
        row = row.detach().requires_grad_()
        row.log_softmax(-1)[token].backward()
        norms.append(row.grad.norm())
    return torch.stack(norms)


def test_logit_grad_norm_by_hand():
    # pi = (1/2, 1/4, 1/4): 1 - 2/2 + 6/16 = 3/8 for the first, 1 - 2/4 + 6/16 = 7/8 for the second
    log_squares = torch.tensor([6 / 16, 6 / 16]).log()
    norms = logit_grad_norm(torch.tensor([0.5, 0.25]).log(), log_squares)
    torch.testing.assert_close(norms, torch.tensor([3 / 8, 7 / 8]).sqrt())
    padding = torch.zeros(1)
    assert logit_grad_norm(padding, padding).item() == 0


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 30.0])
def test_logit_grad_norm_equals_autograd_and_keeps_the_papers_bound(scale):
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(0)) * scale
    logps = logits.log_softmax(-1)
    ids = logps.exp().multinomial(1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    picked = logps.gather(1, ids[:, None]).squeeze(1)
    norms = logit_grad_norm(picked, (2 * logps).logsumexp(-1))
    sharp = picked.exp() > 0.997  # where float32 cannot tell, see the docstring
    expected = per_token_norms(logits, ids).float()
    torch.testing.assert_close(norms[~sharp], expected[~sharp], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norms[sharp], expected[sharp], atol=3e-4, rtol=0)
    rest = -picked.expm1()
    assert (norms <= 2**0.5 * rest * (1 + 1e-5)).all()
    assert (norms >= rest).all()
    assert (norms >= (50 / 49) ** 0.5 * rest * (1 - 1e-5))[~sharp].all()


def test_band_sums_by_hand_and_on_the_edges():
    probs = torch.tensor([[0.0, 0.25, 0.26], [0.5, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    sums = band_sums(probs.log(), mask, (values, torch.tensor([[1.0], [10.0]])), EDGES)
    expected = [[2, 3, 2], [2, 12, 11], [0, 0, 0], [1, 16, 10]]
    assert sums.tolist() == expected
    for (low, high), row in zip(itertools.pairwise(EDGES), expected, strict=True):
        assert prob_band_mask(probs.log(), mask, low, high).sum() == row[0]


def test_band_sums_add_up_to_the_whole_for_any_bands_and_padding():
    generator = torch.Generator().manual_seed(0)
    logps = torch.rand(6, 9, generator=generator).log()
    values, mask = torch.randn(6, 9, generator=generator), torch.rand(6, 9) < 0.7
    whole = band_sums(logps, mask, (values,), [0.0, 1.0])
    torch.testing.assert_close(whole[0], torch.stack([mask.sum(), (values * mask).sum()]).float())
    for edges in (EDGES, [0.0, 0.01, 0.99, 1.0]):
        torch.testing.assert_close(band_sums(logps, mask, (values,), edges).sum(0), whole[0])
    padded = [torch.nn.functional.pad(x, (0, 3)) for x in (logps, mask, values)]
    torch.testing.assert_close(
        band_sums(padded[0], padded[1], (padded[2],), EDGES),
        band_sums(logps, mask, (values,), EDGES),
    )


def test_watched_rows_are_positive_first_and_spread():
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.0, 3.0, -2.0, 4.0, 5.0])
    assert watched_rows(advantages, 0.25).tolist() == [0, 7]
    assert watched_rows(advantages, 0.75).tolist() == [0, 3, 4, 6, 7, 1]
    assert watched_rows(advantages, 1).tolist() == [0, 3, 4, 6, 7, 1, 2, 5]
    assert watched_rows(-advantages.abs(), 0.01).tolist() == [0]


def logits_of(trainer, inputs) -> torch.Tensor:
    """(B, T, V), at the sampling temperature, from the model's plain forward pass."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits
    return logits[:, inputs["prompt_ids"].size(1) - 1 : -1] / trainer.temperature


def whole_buffer(trainer) -> dict:
    pieces = trainer._buffered_inputs
    return {k: torch.cat([p[k] for p in pieces]) for k, v in pieces[0].items() if v.ndim}


def brute_force(trainer, inputs, weight) -> dict[str, float]:
    """The rollout's metrics, token by token; `weight(p)` is the method's factor."""
    logits = logits_of(trainer, inputs)
    sums = {name: [0.0] * 4 for name in ("tokens", "advantage", "grad", "entropy")}
    for i, length in enumerate(inputs["completion_mask"].sum(1)):
        ids = inputs["completion_ids"][i, :length]
        norms = per_token_norms(logits[i, :length], ids)
        for logit, token, norm in zip(logits[i], ids, norms, strict=False):
            probs = logit.double().softmax(-1)
            p, size = probs[token].item(), abs(inputs["advantages"][i].item())
            band = next(k for k in range(4) if p <= EDGES[k + 1])
            sums["tokens"][band] += 1
            sums["advantage"][band] += size
            sums["grad"][band] += size * weight(p) * norm.item()
            sums["entropy"][band] -= (probs * probs.log()).sum().item()
    result = {}
    for name, key in (("tokens", "token"), ("advantage", "advantage"), ("grad", "grad")):
        result |= {
            f"prob/{key}_share/{band}": value / sum(sums[name])
            for band, value in zip(BANDS, sums[name], strict=True)
        }
    return result | {
        f"prob/entropy/{band}": value / count
        for band, value, count in zip(BANDS, sums["entropy"], sums["tokens"], strict=True)
        if count
    }


@pytest.mark.parametrize("tricks", [True, False])
@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({"diagnostics": True}, lambda p: 1.0),
        ({"diagnostics": True, "update_padding_free": True}, lambda p: 1.0),
        ({"ar_alpha": 0.7}, lambda p: 0.7 * p + 0.3),
        ({"lopti_eta": 0.5, "prob_band": [0.25, 0.75]}, lambda p: float(0.25 < p <= 0.75)),
    ],
)
def test_the_rollouts_metrics_equal_brute_force(rollout, fields, weight, tricks):
    trainer, _ = rollout(max_completion_length=24, temperature=0.6, tricks=tricks, **fields)
    expected = brute_force(trainer, whole_buffer(trainer), weight)
    assert len(expected) == 16
    logged = trainer._metrics["train"]
    for name, value in expected.items():
        assert logged[name] == [pytest.approx(value, abs=1e-5)], name
    for share in ("token", "advantage", "grad"):
        assert sum(logged[f"prob/{share}_share/{band}"][0] for band in BANDS) == pytest.approx(1)


class Recorder(LoptiGRPOTrainer):
    """Keeps, of every micro-step, the inputs, the tokens that trained and their log-probs."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        trained, logps = self._scored.gate, self._scored.logps
        self.__dict__.setdefault("records", []).append((inputs, trained, logps))
        return loss


@pytest.mark.parametrize("fields", [BOTH, {"diagnostics": True, "num_iterations": 2}])
def test_change_and_clipping_equal_a_count_by_hand(make_trainer, fields):
    trainer = make_trainer(
        Recorder, max_steps=4, learning_rate=0.05, max_completion_length=24, **fields
    )
    trainer.train()
    clipped_tokens = 0
    for row, (inputs, trained, logps) in zip(
        trainer.state.log_history, trainer.records, strict=False
    ):
        tokens, changes, clips = [0] * 4, [0.0] * 4, [0] * 4
        for i, j in trained.nonzero().tolist():
            old, advantage = inputs["old_per_token_logps"][i, j].exp(), inputs["advantages"][i]
            if advantage == 0:
                continue
            band = next(k for k in range(4) if old <= EDGES[k + 1])
            ratio = logps[i, j].exp() / old
            tokens[band] += 1
            changes[band] += (logps[i, j].exp() - old).item()
            clips[band] += bool(ratio < 0.8 if advantage < 0 else ratio > 1.24)
        for band, count, change, clip in zip(BANDS, tokens, changes, clips, strict=True):
            assert (f"prob/change/{band}" in row) == (count > 0)
            if count:
                assert row[f"prob/change/{band}"] == pytest.approx(change / count, abs=1e-6)
                assert row[f"prob/clip_ratio/{band}"] == pytest.approx(clip / count)
        clipped_tokens += sum(clips)
    assert clipped_tokens > 10


def test_rose_equals_a_count_on_the_policies_before_and_after(make_trainer):
    trainer = make_trainer(max_steps=4, diagnostics_rows=1, max_completion_length=24, **BOTH)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.train()
    inputs = whole_buffer(trainer)
    after = logits_of(trainer, inputs)
    trainer.model.load_state_dict(before)
    tokens, rose = [0] * 4, [0] * 4
    for i, j in inputs["completion_mask"].nonzero().tolist():
        if inputs["advantages"][i] <= 0:
            continue
        token = inputs["completion_ids"][i, j]
        old = logits_of(trainer, inputs)[i, j].softmax(-1)[token]
        band = next(k for k in range(4) if old <= EDGES[k + 1])
        tokens[band] += 1
        rose[band] += bool(after[i, j].softmax(-1)[token] > old)
    rows = trainer.state.log_history
    assert not any(name.startswith("prob/rose") for row in rows[:3] for name in row)
    assert sum(tokens) > 20
    for band, count, number in zip(BANDS, tokens, rose, strict=True):
        if count:
            assert rows[3][f"prob/rose/{band}"] == pytest.approx(number / count)
            assert rows[3][f"prob/tied/{band}"] == 0


@pytest.mark.parametrize("tricks", [True, False])
def test_nothing_rises_without_a_learning_rate(make_trainer, tricks):
    trainer = make_trainer(learning_rate=0.0, max_steps=8, tricks=tricks, **BOTH)
    trainer.train()
    rows = [row for row in trainer.state.log_history if any("prob/tied" in k for k in row)]
    assert len(rows) == 2  # rollout batches
    for row in rows:
        assert {v for k, v in row.items() if k.startswith("prob/tied")} == {1.0}
        assert {v for k, v in row.items() if k.startswith("prob/rose")} == {0.0}
    for row in trainer.state.log_history:
        assert all(abs(v) < 1e-5 for k, v in row.items() if k.startswith("prob/change"))


@pytest.mark.parametrize(
    "fields",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "tricks": True},
    ],
)
def test_metrics_do_not_depend_on_micro_batches_or_padding(make_trainer, fields):
    logs = []
    for layout in ({}, fields):
        steps = 2 * layout.get("gradient_accumulation_steps", 1)
        trainer = make_trainer(
            max_steps=8,
            max_completion_length=24,
            diagnostics_rows=1,
            loss_type="dapo",
            steps_per_generation=steps,
            optim="sgd",  # AdamW would magnify rounding
            **layout,
            **BOTH,
        )
        trainer.train()
        rows = trainer.state.log_history
        logs.append([{k: v for k, v in row.items() if k.startswith("prob/")} for row in rows])
    assert {k.split("/")[1] for row in logs[0] for k in row} >= {"grad_share", "change", "rose"}
    for ours, theirs in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"steps_per_generation": 1},  # TRL leaves pi_old out
        {"num_iterations": 2, "beta": 0.04, "peft_config": LORA},
        {"ar_alpha": 0.3, "steps_per_generation": 1},
        {"tricks": True, "diagnostics_rows": 1.0, **BOTH},
        {"tricks": True, "update_padding_free": True, **BOTH},
        {"diw": True, "beta": 0.04},
    ],
)
def test_training_is_the_same_with_and_without(make_trainer, fields):
    runs = []
    for diagnostics in (True, False):
        trainer = make_trainer(diagnostics=diagnostics, max_steps=6, **fields)
        trainer.train()
        runs.append(trainer)
    assert_same_training(*runs)
    ours, theirs = map(metrics, runs)
    names = [
        [name for name in list(row) if name.startswith("prob/") and row.pop(name) is not None]
        for row in ours
    ]
    assert {name.split("/")[1] for row in names for name in row} == {
        "token_share",
        "advantage_share",
        "grad_share",
        "entropy",
        "change",
        "clip_ratio",
        "rose",
        "tied",
    }
    assert ours == theirs


def test_diagnostics_are_on_with_a_method_and_off_without():
    config = {"use_cpu": True, "bf16": False, "output_dir": "unused"}
    assert not LoptiGRPOConfig(**config).uses_diagnostics
    assert LoptiGRPOConfig(**config, diagnostics=True).uses_diagnostics
    for method in ({"ar_alpha": 0.1}, {"lopti_eta": 0.5}, {"prob_band": [0, 0.5]}):
        assert LoptiGRPOConfig(**config, **method).uses_diagnostics
        assert not LoptiGRPOConfig(**config, **method, diagnostics=False).uses_diagnostics


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"diagnostics_bands": [0.0, 0.5]}, "does not rise from 0 to 1"),
        ({"diagnostics_bands": [0.0, 0.6, 0.5, 1.0]}, "does not rise from 0 to 1"),
        ({"diagnostics_bands": [0.0]}, "For quarters use 0 0.25 0.5 0.75 1"),
        ({"diagnostics_rows": 1.5}, "share of the rows. Use 0"),
    ],
)
def test_bad_values_are_named_with_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        LoptiGRPOConfig(use_cpu=True, bf16=False, output_dir="unused", **fields)


def test_bands_can_be_chosen(rollout):
    trainer, inputs = rollout(ar_alpha=0.3, diagnostics_bands=[0.0, 0.1, 1.0])
    rows = whole_buffer(trainer)
    rare = (rows["old_per_token_logps"].exp() <= 0.1) & valid_tokens(rows).bool()
    share = (rare.sum() / rows["completion_mask"].sum()).item()
    assert trainer._metrics["train"]["prob/token_share/0-0.1"] == [pytest.approx(share)]
    assert trainer._metrics["train"]["prob/token_share/0.1-1"] == [pytest.approx(1 - share)]
    assert len(inputs["advantages"]) == len(PROMPTS) // 2
