"""The offline analysis: gradients add up, norms equal those computed one by one, nothing trains."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from test_diagnostics import logits_of, per_token_norms

from lopti_trl.analyze import (
    Probe,
    Records,
    Settings,
    analyze,
    layer_norms,
    main,
    norm,
    parse,
    random_advantages,
    rollouts,
    selective_updates,
    token_samples,
)
from lopti_trl.diagnostics import band_names
from lopti_trl.language import load_word_classes, reward_correlation, word_frequencies
from lopti_trl.report import save_analysis_figures, theory_rows
from lopti_trl.train import PACKAGE

EDGES = [0.0, 0.25, 0.5, 0.75, 1.0]
BANDS = band_names(EDGES)
METHODS = {"ar_alpha": 0.3, "lopti_eta": 0.4, "diagnostics_rows": 0.0}


@pytest.fixture
def trainer(make_trainer):
    return make_trainer(max_completion_length=24, loss_type="dapo", **METHODS)


@pytest.fixture
def probe(trainer):
    [(rollout, _)] = rollouts(trainer, 1)
    return Probe(trainer, rollout)


def policy_gradient(trainer, rollout, selected, weights=1.0) -> list[torch.Tensor]:
    """Of -sum A w pi / pi_old over the selected tokens / all tokens, from plain logits."""
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], 1)
    mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], 1)
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits
    logits = logits[:, rollout["prompt_ids"].size(1) - 1 : -1] / trainer.temperature
    logps = logits.log_softmax(-1).gather(2, rollout["completion_ids"][..., None]).squeeze(2)
    terms = (logps - logps.detach()).exp() * rollout["advantages"][:, None] * weights
    loss = -(terms * selected).sum() / rollout["completion_mask"].sum()
    return torch.autograd.grad(loss, list(trainer.model.parameters()))


def test_fig_1d_equals_norms_computed_one_by_one_and_gradients_add_up(probe):
    records = Records()
    selective_updates(probe, records, 0, Settings())
    frame = records.frame()
    norms = frame[frame.figure == "gradient norm"].set_index("x").value
    probs, valid = probe.old_logps.exp(), probe.mask
    sets = {
        name: (probs > low) & (probs <= high) & valid
        for name, (low, high) in zip(BANDS, itertools.pairwise(EDGES), strict=True)
    }
    sets |= {"low": (probs < 0.4) & valid, "high": (probs >= 0.4) & valid, "all": valid}
    assert set(norms.index) == set(sets)
    for name, selected in sets.items():
        gradient = policy_gradient(probe.trainer, probe.rollout, selected)
        expected = torch.cat([g.flatten() for g in gradient]).norm().item()
        assert norms[name] == pytest.approx(expected, rel=1e-4), name
    errors = frame[frame.figure == "sum error"]
    assert set(errors.series) == {"bands", "phases"}
    assert (errors.value < 1e-5).all()


def test_gradients_equal_those_of_the_formula_token_set_by_token_set(probe):
    trainer, rollout = probe.trainer, probe.rollout
    probs = rollout["old_per_token_logps"].exp()
    valid = rollout["completion_mask"].bool()
    sets = [(probs > low) & (probs <= high) & valid for low, high in itertools.pairwise(EDGES)]
    total = None
    for selected in [*sets, valid]:
        ours = probe.gradient(selected)
        expected = policy_gradient(trainer, rollout, selected)
        for value, other in zip(ours.values(), expected, strict=True):
            torch.testing.assert_close(value, other, atol=1e-6, rtol=1e-4)
        assert norm(ours) == pytest.approx(
            torch.cat([g.flatten() for g in expected]).norm().item(), rel=1e-4
        )
        parts = layer_norms(ours)
        assert {"embed_tokens", "layer 0", "layer 1", "norm"} <= set(parts)
        assert math.hypot(*parts.values()) == pytest.approx(norm(ours))
        if selected is not valid:
            total = ours if total is None else {n: total[n] + g for n, g in ours.items()}
    for name, value in ours.items():
        torch.testing.assert_close(total[name], value, atol=1e-6, rtol=1e-4)


def test_descent_moves_log_probs_as_the_gradient_says_and_is_undone(probe):
    start = {name: p.clone() for name, p in probe.model.named_parameters()}
    gradient = probe.gradient(probe.mask)
    after = probe.descend(gradient, 0.5)
    for name, p in probe.model.named_parameters():
        assert torch.equal(p, start[name])
    with torch.no_grad():
        for name, p in probe.model.named_parameters():
            p.sub_(0.5 * gradient[name])
    logps = logits_of(probe.trainer, probe.rollout).log_softmax(-1)
    expected = logps.gather(2, probe.rollout["completion_ids"][..., None]).squeeze(2)
    torch.testing.assert_close(after[probe.mask], expected[probe.mask], atol=1e-5, rtol=1e-5)
    assert (after - probe.before)[probe.mask].abs().max() > 0.01
    probe.restore()


def test_lopti_takes_its_second_step_where_the_first_ended(probe):
    low = (probe.old_logps.exp() < 0.4) & probe.mask
    probe.trainer.args.learning_rate, probe.trainer.args.max_grad_norm = 0.1, 0.0
    after = probe.update([(low, None), (probe.mask & ~low, None)], "sgd")
    model, clip = probe.model, (0.8, 1.24)
    parameters = list(model.parameters())
    for selected in (low, probe.mask & ~low):
        logps = logits_with_gradient(probe)
        ratio = (logps - probe.old_logps).exp()
        advantages = probe.rollout["advantages"][:, None]
        terms = torch.minimum(ratio * advantages, ratio.clamp(*clip) * advantages)
        loss = -(terms * selected).sum() / probe.mask.sum()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.sub_(0.1 * g)
    expected = logits_with_gradient(probe).detach()
    torch.testing.assert_close(after[probe.mask], expected[probe.mask], atol=1e-4, rtol=1e-4)
    probe.restore()


def logits_with_gradient(probe) -> torch.Tensor:
    rollout = probe.rollout
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], 1)
    mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], 1)
    logits = probe.model(input_ids=ids, attention_mask=mask).logits
    logits = logits[:, rollout["prompt_ids"].size(1) - 1 : -1] / probe.trainer.temperature
    return logits.log_softmax(-1).gather(2, rollout["completion_ids"][..., None]).squeeze(2)


def test_the_whole_analysis_holds_what_it_says(trainer):
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    frame, facts = analyze(trainer, Settings(batches=2, activation_tokens=6, samples=3))
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]), name

    def table(figure):
        rows = frame[frame.figure == figure]
        return rows.pivot_table(index=["series", "batch"], columns="x", values="value")

    assert table("tokens").sum(axis=1).tolist() == pytest.approx([1, 1])
    assert set(table("change").index.levels[0]) == {*BANDS, "all"}
    assert set(table("rose").index.levels[0]) == {
        "GRPO",
        "GRPO, two steps",
        "AR",
        "Lopti",
        "AR + Lopti",
    }
    cosines = table("cosine")
    for batch in range(2):
        for name in (*BANDS, "low", "high", "all"):
            if (name, batch) in cosines.index:
                assert cosines.loc[(name, batch), name] == pytest.approx(1)
    norms = table("gradient norm").loc["norm"]
    whole = norms["low"] ** 2 + norms["high"] ** 2
    whole += 2 * norms["low"] * norms["high"] * cosines.loc["low"]["high"]
    assert (whole**0.5).tolist() == pytest.approx(norms["all"].tolist(), rel=1e-4)
    bound = table("bound").loc["found"]
    assert (bound["share within"] == 1).all()
    assert (bound["highest"] <= 2**0.5 * 1.001).all()
    assert len(frame[(frame.figure == "gain") & (frame.x == "median")]) == 2 * 3
    json.dumps(facts)

    [sample, *_] = facts["samples"]
    assert len(facts["samples"]) == 3
    assert len(sample["tokens"]) == len(sample["probs"]) == len(sample["grad_shares"])
    assert len(facts["rewards"]) == 16


def test_sample_shares_are_those_of_brute_force(trainer):
    [(rollout, rewards)] = rollouts(trainer, 1)
    probe = Probe(trainer, rollout)
    samples = token_samples(probe, trainer._diagnostics.squares_of(rollout), rewards, 8)
    assert sum(sum(s["grad_shares"]) for s in samples) == pytest.approx(1)
    logits = logits_of(trainer, rollout)
    sizes = [
        rollout["advantages"][i].abs()
        * per_token_norms(logits[i][m], rollout["completion_ids"][i][m])
        for i, m in enumerate(probe.mask)
    ]
    total = sum(size.sum() for size in sizes).item()
    for sample, size in zip(samples, sizes, strict=True):
        assert sample["grad_shares"] == pytest.approx((size / total).tolist(), abs=1e-5)


# Language


def test_word_frequencies_by_hand(tmp_path):
    classes = load_word_classes()
    text = "So Alice says: this must  be false. Because of that claim, so is Bob's sofa, therefore."
    assert word_frequencies(text, 500, classes) == {
        "Analysis": 0.0,
        "Statement": 4.0,
        "Causal": 2.0,
        "Conclusion": 6.0,
        "Assumption": 0.0,
        "Assertion": 2.0,
    }
    path = tmp_path / "words.yaml"
    path.write_text("Doubt: {words: [vielleicht, 'zweif*']}")
    german = load_word_classes(path)
    assert word_frequencies("Vielleicht zweifelt er, zweifach.", 10, german) == {"Doubt": 300.0}
    path.write_text("Doubt: {words: []}")
    with pytest.raises(ValueError, match="'Doubt' has no words"):
        load_word_classes(path)


def test_reward_correlation_is_pearsons_with_an_interval_that_covers():
    generator = np.random.default_rng(0)
    covered = 0
    for seed in range(60):
        x = generator.normal(size=80)
        y = 0.6 * x + 0.8 * generator.normal(size=80)
        r, low, high = reward_correlation(x, y, resamples=500, seed=seed)
        assert r == pytest.approx(stats.pearsonr(x, y).statistic)
        covered += low <= 0.6 <= high
    assert 51 <= covered <= 60
    assert reward_correlation([1.0, 1.0, 1.0], [0.0, 1.0, 2.0]) is None
    assert reward_correlation([1.0], [0.0]) is None


# The command


def test_options_of_train_are_taken_and_methods_have_their_defaults(tmp_path):
    options = ["kk-tiny", "--task", "kk", "--output_dir", str(tmp_path), "--batches", "2"]
    settings, task, config, model = parse([*options, "--num_people", "2", "3", "--use_cpu", "true"])
    assert (settings.batches, task.num_people) == (2, [2, 3])
    assert (config.ar_alpha, config.lopti_eta, config.uses_diagnostics) == (0.3, 0.5, True)
    assert model.model_name_or_path == "kk-tiny"
    _, _, config, _ = parse([*options, "--ar_alpha", "0.1", "--lopti_eta", "0.4"])
    assert (config.ar_alpha, config.lopti_eta) == (0.1, 0.4)


@pytest.mark.slow
def test_the_command_writes_table_facts_and_figures(tmp_path):
    if not (PACKAGE / "assets" / "kk-tiny").is_dir():
        pytest.skip("the tiny model is not here")
    options = (
        "--config kk_tiny_cpu.yaml --batches 1 --train_puzzles 8 --num_generations 4 "
        "--per_device_train_batch_size 16 --max_completion_length 48"
    )
    output = main(["kk-tiny", *options.split(), "--output_dir", str(tmp_path / "analysis")])
    facts = json.loads((output / "analysis.json").read_text())
    assert facts["bands"] == BANDS
    assert (output / "analysis.parquet").is_file()
    figures = {path.name for path in (output / "figures").iterdir()}
    for name in ("gradient_norm", "rose", "change", "language"):
        assert {f"{name}.pdf", f"{name}.png"} <= figures


@pytest.mark.parametrize(
    ("chosen", "made"),
    [
        (["1"], {"tokens", "change", "gradient_norm", "cosine", "layers"}),
        (["3"], {"rose", "tied"}),
        (["5"], set()),  # a random model uses none of the words
        (["theory"], {"gain"}),
    ],
)
def test_only_the_figures_asked_for_are_made(trainer, tmp_path, chosen, made):
    frame, facts = analyze(trainer, Settings(figures=chosen, batches=1, activation_tokens=3))
    save_analysis_figures(frame, facts | {"bands": BANDS}, tmp_path)
    files = {path.stem for path in tmp_path.glob("*.png")}
    assert made <= files
    others = {"tokens", "change", "rose", "tied", "gain", "language"} - made
    assert not files & others
    assert bool(facts["language"]) == (chosen == ["5"])
    names = {name for name, _ in theory_rows(frame)}
    assert ("tokens within the bound" in names) == (chosen == ["theory"])
    assert ("relative error of the sum over bands" in names) == (chosen == ["1"])


def test_rewards_without_spread_are_refused_and_random_advantages_serve(make_trainer):
    trainer = make_trainer(
        reward_funcs=lambda completions, **kwargs: [2.0] * len(completions), **METHODS
    )
    settings = {"figures": ["1"], "batches": 1}
    with pytest.raises(ValueError, match=r"All 8 completions of rollout batch 1 .*\[2.0\]"):
        analyze(trainer, Settings(**settings))
    frame, _ = analyze(trainer, Settings(advantages="random", **settings))
    norms = frame[(frame["figure"] == "gradient norm") & (frame["x"] == "all")]
    assert norms["value"].item() > 1e-3
    sizes = frame[(frame["figure"] == "advantage") & (frame["series"] == "mean size")]
    assert set(sizes["value"]) == {1.0}
    signs = random_advantages(9, seed=3)
    assert signs.tolist() != random_advantages(9, seed=4).tolist()
    assert (signs.sum(), set(signs.tolist())) == (1, {1.0, -1.0})
