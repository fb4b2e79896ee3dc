"""Levels 1 and 4: REINFORCE++ advantages by hand, in the trainer and over two processes."""

import math
import statistics
import subprocess
import sys

import pytest
import torch
from ranks import run_ranks
from test_off_is_grpo import assert_same_training

from lopti_trl.advantages import whiten_over_tokens
from lopti_trl.train import method_name, parse_args

NAN = math.nan
PLUS_PLUS = {"advantage": "reinforce_plus_plus", "scale_rewards": "batch"}


def by_hand(rewards: list[float], num_tokens: list[int]) -> list[float]:
    """The definition token by token, in plain Python."""
    tokens = [r for r, n in zip(rewards, num_tokens, strict=True) for _ in range(n)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(r - mean) / math.sqrt(variance + 1e-8) for r in rewards]


def test_whitening_matches_hand_computation():
    # tokens 0 0 0 4: mean 1, variance (1 + 1 + 1 + 9) / 3 = 4
    advantages = whiten_over_tokens(torch.tensor([0.0, 4.0]), torch.tensor([3, 1]))
    torch.testing.assert_close(advantages, torch.tensor([-0.5, 1.5]))
    # as many tokens each: mean 2, variance 4 * 4 / 3
    advantages = whiten_over_tokens(torch.tensor([0.0, 4.0]), torch.tensor([2, 2]))
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]) * 3**0.5 / 2)


def test_whitening_has_zero_mean_and_unit_variance_over_the_tokens():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(32, generator=generator) * 3 + 7
    num_tokens = torch.randint(1, 4096, (32,), generator=generator)
    advantages = whiten_over_tokens(rewards, num_tokens)
    tokens = advantages.repeat_interleave(num_tokens).double()
    assert tokens.mean().abs() < 1e-6
    assert abs(tokens.var().item() - 1) < 1e-6
    expected = torch.tensor(by_hand(rewards.tolist(), num_tokens.tolist()))
    torch.testing.assert_close(advantages, expected)
    # the length of a completion weighs: plain whitening over sequences is another thing
    plain = (rewards - rewards.mean()) / rewards.std()
    assert (advantages - plain).abs().max() > 0.05


def test_unscored_and_empty_sequences_move_nothing():
    rewards, num_tokens = torch.tensor([0.0, NAN, 4.0, 100.0]), torch.tensor([3, 50, 1, 0])
    advantages = whiten_over_tokens(rewards, num_tokens)
    torch.testing.assert_close(advantages, torch.tensor([-0.5, 0.0, 1.5, 49.5]))


@pytest.mark.parametrize(
    ("rewards", "num_tokens"),
    [([2.0, 2.0], [3, 5]), ([NAN, NAN], [3, 5]), ([1.0, NAN], [1, 1]), ([1.0, 2.0], [0, 0])],
)
def test_a_batch_without_spread_has_no_advantage_and_no_nan(rewards, num_tokens):
    advantages = whiten_over_tokens(torch.tensor(rewards), torch.tensor(num_tokens))
    assert advantages[torch.tensor(num_tokens) > 0].tolist() == [0.0] * sum(map(bool, num_tokens))
    assert advantages.isfinite().all()


def test_the_file_loads_torch_and_nothing_heavier():
    code = "import sys, lopti_trl.advantages; sys.exit('trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# In the trainer


def rewards_and_tokens(rows: dict) -> tuple[list[float], list[int]]:
    """Of buffered rows: the reward of conftest.letters_reward and the valid tokens."""
    masks = rows["completion_mask"].bool()
    ids = [row[mask].tolist() for row, mask in zip(rows["completion_ids"], masks, strict=True)]
    return [sum(i % 2 == 0 for i in row) / len(row) for row in ids], [len(row) for row in ids]


def buffered(trainer, keys) -> dict:
    return {key: torch.cat([part[key] for part in trainer._buffered_inputs]) for key in keys}


KEYS = ("advantages", "completion_ids", "completion_mask")


@pytest.mark.parametrize("methods", [{}, {"ar_alpha": 0.1, "lopti_eta": 0.5, "tricks": None}])
def test_the_buffer_holds_the_batch_whitened_by_hand(rollout, methods):
    trainer, _ = rollout(**PLUS_PLUS, **methods)
    rows = buffered(trainer, KEYS)
    rewards, num_tokens = rewards_and_tokens(rows)
    assert len(set(rewards)) > 2
    assert len(set(num_tokens)) > 1
    torch.testing.assert_close(rows["advantages"], torch.tensor(by_hand(rewards, num_tokens)))
    logged = sorted(trainer._logs["advantages"])
    assert logged == sorted(rows["advantages"].tolist())


def test_truncated_completions_that_are_masked_have_no_say(rollout):
    trainer, _ = rollout(**PLUS_PLUS, mask_truncated_completions=True)
    rows = buffered(trainer, KEYS)
    kept = rows["completion_mask"].any(1)
    assert 1 < kept.sum() < len(kept)
    whole = {key: value[kept] for key, value in rows.items()}
    expected = torch.tensor(by_hand(*rewards_and_tokens(whole)))
    torch.testing.assert_close(whole["advantages"], expected)


def test_it_trains_another_model_than_grpo_and_grpo_by_name_is_the_default(make_trainer):
    runs = {}
    for name, fields in (("off", {}), ("grpo", {"advantage": "grpo"}), ("plus", PLUS_PLUS)):
        runs[name] = make_trainer(max_steps=2, **fields)
        runs[name].train()
    assert_same_training(runs["grpo"], runs["off"])
    pairs = zip(runs["plus"].model.parameters(), runs["off"].model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-4


def test_evaluation_keeps_grpos_advantage(make_trainer):
    results = []
    for fields in ({"scale_rewards": "batch"}, PLUS_PLUS):
        trainer = make_trainer(per_device_eval_batch_size=4, **fields)
        torch.manual_seed(5)
        results.append(trainer.evaluate(trainer.train_dataset.select(range(4)))["eval_loss"])
    assert results[0] == results[1]


# Over two processes


def rollout_of_rank(world_size: int, make_trainer) -> dict:
    """One generated rollout batch of 12 completions; with two ranks the second group is on both."""
    trainer = make_trainer(
        per_device_train_batch_size=12 // world_size,
        steps_per_generation=1,
        max_steps=1,
        **PLUS_PLUS,
    )
    assert trainer.accelerator.num_processes == world_size
    trainer.train()
    return buffered(trainer, KEYS)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_two_processes_whiten_over_the_tokens_of_both(make_trainer, tmp_path):
    ranks = run_ranks(rollout_of_rank, tmp_path / "two", 2, make_trainer)
    facts = [rewards_and_tokens(rows) for rows in ranks]
    assert facts[0] != facts[1]
    rewards, num_tokens = (first + second for first, second in zip(*facts, strict=True))
    expected = torch.tensor(by_hand(rewards, num_tokens))
    advantages = torch.cat([rows["advantages"] for rows in ranks])
    torch.testing.assert_close(advantages, expected)
    alone = torch.tensor(by_hand(*facts[0]))  # what a rank by itself would have got
    assert (ranks[0]["advantages"] - alone).abs().max() > 0.01


# The recipe


def test_the_recipe_is_grpos_but_for_the_advantage_and_the_published_strengths(tmp_path):
    base, ours = (
        parse_args(["--config", name, "--use_cpu", "true", "--output_dir", str(tmp_path)])[1]
        for name in ("kk_qwen3b.yaml", "kk_qwen3b_reinforce_pp.yaml")
    )
    theirs = base.to_dict()
    assert {name: value for name, value in ours.to_dict().items() if value != theirs[name]} == {
        "advantage": "reinforce_plus_plus",
        "scale_rewards": "batch",
        "ar_alpha": 0.1,
        "lopti_eta": 0.5,
    }
    assert method_name(ours).startswith("REINFORCE++ + AR (alpha 0.1) + Lopti (eta 0.5")
