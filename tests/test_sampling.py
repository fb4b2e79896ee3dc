"""Levels 1, 2 and 4: dynamic sampling and the soft overlong punishment."""

import inspect
import math
from collections import Counter

import pytest
import torch
from conftest import letters_reward
from datasets import Dataset
from ranks import run_ranks
from test_config import config
from test_off_is_grpo import assert_same_training, metrics
from test_resume import EVERY_STEP, assert_equal_states, final_state, logged
from trl import GRPOTrainer

from lopti_trl import LoptiGRPOTrainer
from lopti_trl.sampling import has_spread, weighted_sum
from lopti_trl.train import parse_args

NAN = math.nan
METHODS = {
    "grpo": {},
    "ar and lopti": {"ar_alpha": 0.3, "lopti_eta": 0.5, "tricks": None},
    "iterations and kl": {"num_iterations": 2, "beta": 0.04},
}
GROUP = 4  # conftest's num_generations
ON = {"dynamic_sampling_rounds": 3}


# Which groups spread


@pytest.mark.parametrize(
    ("group", "spreads"),
    [
        ([0.0, 0.0, 1.0], True),
        ([-3.0, -3.0, -3.0], False),  # all wrong
        ([3.0, 3.0, 3.0], False),  # all right
        ([0.5, 0.5, 0.5], False),  # neither, as a filter by the mean has it
        ([0.0, 1.0, 0.5], True),  # whose mean is that group's
        ([1.0, 1.0, 1.0 + 1e-9], False),  # rounding
        ([0.3, 0.1 + 0.2, 0.3], False),
        ([1000.0, 1000.0001, 1000.0], False),
        ([0.0, 1e-3, 0.0], True),
        ([NAN, 1.0, 1.0], False),
        ([NAN, 1.0, 0.0], True),
        ([NAN, NAN, 1.0], False),
        ([NAN, NAN, NAN], False),
    ],
)
def test_a_group_spreads_if_its_rewards_differ(group, spreads):
    rewards = torch.tensor([[5.0], [6.0], [7.0], *([value] for value in group)])
    assert has_spread(rewards, 3).tolist() == [True, spreads]
    assert has_spread(torch.tensor([[5.0]] * 3), 3).tolist() == [False]


def test_the_reward_is_trls_weighted_sum():
    rewards = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    total = weighted_sum(rewards, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(total, torch.tensor([2.0, 1.0, NAN]), equal_nan=True)


def test_columns_that_cancel_spread_one_by_one_but_not_in_their_sum():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert has_spread(rewards, 2).tolist() == [True]
    assert has_spread(weighted_sum(rewards, torch.ones(2)).unsqueeze(1), 2).tolist() == [False]


# In the trainer

WORDS = [a + b for a in "bcdfghjk" for b in "aeiou"]  # 40 prompts, no two alike


def sum_reward(prompts, completion_ids, **kwargs) -> list[float]:
    """Spreads over random completions, but not for prompts in a, i and u: .5, all alike."""
    return [
        0.5 if prompt[-1] in "aiu" else sum(ids) / 100
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def always_flat(completions, **kwargs) -> list[float]:
    return [1.0] * len(completions)


@pytest.fixture
def make(make_trainer):
    """`make(reward, prompts, **fields)`: a trainer with a reward of the test's own."""

    def build(reward=sum_reward, prompts=WORDS, **fields):
        dataset = Dataset.from_dict({"prompt": prompts})
        return make_trainer(reward_funcs=reward, train_dataset=dataset, **fields)

    return build


def buffer(trainer) -> dict:
    parts = trainer._buffered_inputs
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0] if parts[0][key].ndim}


def texts(trainer, rows: dict, name: str) -> list[str]:
    ids, masks = rows[f"{name}_ids"], rows[f"{name}_mask"].bool()
    letters = [row[mask] for row, mask in zip(ids, masks, strict=True)]
    return [text.replace(" ", "") for text in trainer.processing_class.batch_decode(letters)]


def keep_batches(trainer) -> list[dict]:
    """Filled in training: every new buffer of the trainer."""
    batches, original = [], trainer._prepare_inputs

    def spy(inputs):
        result = original(inputs)
        if trainer._step % trainer._steps_per_rollout == 0:
            batches.append(buffer(trainer))
        return result

    trainer._prepare_inputs = spy
    return batches


@pytest.mark.parametrize("method", METHODS)
def test_where_all_groups_spread_it_changes_no_bit(make, method):
    def distinct(completion_ids, **kwargs):
        shares = letters_reward(completion_ids)
        return [share + i for i, share in enumerate(shares)]

    runs = []
    for fields in ({}, ON):
        trainer = make(distinct, max_steps=6, **METHODS[method], **fields)
        trainer.train()
        runs.append(trainer)
    assert_same_training(*runs)
    off, on = map(metrics, runs)
    ours = [
        {name: row.pop(name) for name in list(row) if name.startswith("dynamic_sampling/")}
        for row in on
    ]
    assert on == off
    rollouts = [row for row in ours if row]
    assert len(rollouts) == (2 if METHODS[method] else 3)  # sweeps of two steps, once or twice
    for row in rollouts:
        counts = {name.split("/")[1]: value for name, value in row.items()}
        assert counts.pop("first_reward") > 3
        assert counts == {"flat_drawn": 0, "flat_left": 0, "rounds": 0, "completions": 0}


@pytest.mark.parametrize("method", METHODS)
def test_flat_groups_give_way_to_fresh_prompts_that_spread(make, method):
    trainer = make(max_steps=8, **METHODS[method], **{**ON, "dynamic_sampling_rounds": 20})
    batches = keep_batches(trainer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "dynamic_sampling/rounds" in row]
    assert len(rows) == len(batches) >= 2
    assert {row["dynamic_sampling/flat_drawn"] for row in rows} & {0.5, 1.0}
    for row, batch in zip(rows, batches, strict=True):
        assert row["dynamic_sampling/flat_left"] == 0
        assert row["frac_reward_zero_std"] == 0
        assert (row["dynamic_sampling/rounds"] > 0) == (row["dynamic_sampling/flat_drawn"] > 0)
        check_batch(trainer, batch, row)


def check_batch(trainer, batch: dict, row: dict) -> None:
    """A buffered batch is 2 groups of 4, each scored and normalised as GRPO's definition says."""
    prompts, completions = (texts(trainer, batch, name) for name in ("prompt", "completion"))
    assert len(prompts) == 2 * GROUP
    masks = batch["completion_mask"].bool()
    ids = [i[m].tolist() for i, m in zip(batch["completion_ids"], masks, strict=True)]
    rewards = torch.tensor(sum_reward(prompts, ids))
    assert row["reward"] == pytest.approx(rewards.mean().item(), rel=1e-5)
    groups = {prompt: [i for i, p in enumerate(prompts) if p == prompt] for prompt in prompts}
    assert [len(group) for group in groups.values()] == [GROUP, GROUP]
    for prompt, group in groups.items():
        assert prompt[-1] in "eo"
        assert len({completions[i] for i in group}) > 1
        values = rewards[group]
        expected = (values - values.mean()) / (values.std() + 1e-4)
        torch.testing.assert_close(batch["advantages"][group], expected, rtol=1e-4, atol=1e-4)


def test_what_trl_computes_of_the_rows_is_of_the_replaced_rows(rollout_of_flat):
    trainer, batch = rollout_of_flat
    width = batch["completion_ids"].size(1)
    with torch.no_grad():
        logps, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer,
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
            width,
        )
    mask = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["old_per_token_logps"][mask], logps[mask])
    low = (logps.exp() < 0.5) & mask
    assert torch.equal(batch["low_prob_mask"], low)
    assert trainer._buffered_inputs[0]["num_items_in_batch"] == mask.sum()


@pytest.fixture
def rollout_of_flat(make):
    """A Lopti trainer after one rollout in which both groups were replaced."""
    trainer = make(lopti_eta=0.5, dynamic_sampling_rounds=20)
    trainer.model.train()
    trainer._prepare_inputs([{"prompt": word} for word in ("ba", "ci") for _ in range(GROUP)])
    assert trainer._metrics["train"]["dynamic_sampling/flat_drawn"] == [1.0]
    return trainer, buffer(trainer)


def test_at_the_cap_the_batch_is_as_large_and_the_rest_is_reported(make):
    trainer = make(always_flat, max_steps=2, **ON)
    before = [p.clone() for p in trainer.model.parameters()]
    batches = keep_batches(trainer)
    trainer.train()
    row = trainer.state.log_history[0]
    shown = {k.split("/")[1]: v for k, v in row.items() if k.startswith("dynamic_sampling/")}
    assert shown == {
        "first_reward": 1,
        "flat_drawn": 1,
        "flat_left": 1,
        "rounds": 3,
        "completions": 3 * 2 * GROUP,
    }
    assert len(batches[0]["advantages"]) == 2 * GROUP
    assert batches[0]["advantages"].tolist() == [0.0] * 2 * GROUP
    for p, q in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_fresh_prompts_are_new_and_each_comes_once(make):
    trainer = make(always_flat, prompts=WORDS[:7], dynamic_sampling_rounds=50)
    asked, original = [], trainer._generate_single_turn

    def spy(prompt_ids, *args, **kwargs):
        asked.append([tuple(ids) for ids in prompt_ids])
        return original(prompt_ids, *args, **kwargs)

    trainer._generate_single_turn = spy
    trainer.model.train()
    trainer._prepare_inputs([{"prompt": word} for word in WORDS[:2] for _ in range(GROUP)])
    assert [len(ids) for ids in asked] == [8, 8, 8, 4]  # 2 + 2 + 2 + 1 prompts, then none is left
    assert len({ids for draw in asked for ids in draw}) == 7
    assert all(len(set(draw[i : i + GROUP])) == 1 for draw in asked for i in range(0, len(draw), 4))
    assert trainer._metrics["train"]["dynamic_sampling/rounds"] == [3]
    assert trainer._metrics["train"]["num_tokens"] == [trainer.state.num_input_tokens_seen]


@pytest.mark.parametrize(
    ("aggregation", "flat"), [("sum_then_normalize", 1.0), ("normalize_then_sum", 0.0)]
)
def test_spread_is_of_what_trl_compares_the_sum_or_each_reward(make, aggregation, flat):
    """2 - 2 * 1 = 0: the sum is alike, the normalised rewards are not."""

    def twice(completions, **kwargs):
        return [2.0 * (i % 2) for i in range(len(completions))]

    def minus(completions, **kwargs):
        return [-1.0 * (i % 2) for i in range(len(completions))]

    fields = {"multi_objective_aggregation": aggregation, "reward_weights": [1.0, 2.0]}
    trainer = make([twice, minus], dynamic_sampling_rounds=1, **fields)
    trainer.model.train()
    trainer._prepare_inputs([{"prompt": word} for word in ("ba", "be") for _ in range(GROUP)])
    assert trainer._metrics["train"]["dynamic_sampling/flat_drawn"] == [flat]
    assert (buffer(trainer)["advantages"].abs().max() > 0.5) == (flat == 0)


def test_only_as_many_groups_are_drawn_as_are_missing_and_good_ones_stay(make):
    trainer = make(dynamic_sampling_rounds=1)
    trainer.model.train()
    trainer._prepare_inputs([{"prompt": word} for word in ("ba", "be") for _ in range(GROUP)])
    assert "be" in texts(trainer, buffer(trainer), "prompt")
    assert trainer._metrics["train"]["dynamic_sampling/flat_drawn"] == [0.5]
    assert trainer._metrics["train"]["dynamic_sampling/completions"] == [GROUP]


def test_logs_of_reward_functions_follow_the_rows_and_their_metrics_the_first_draw(make):
    def talkative(prompts, completions, completion_ids, log_extra, log_metric, **kwargs):
        log_extra("heard", [f"{p}: {c}" for p, c in zip(prompts, completions, strict=True)])
        log_metric("share_flat", sum(p[-1] in "aiu" for p in prompts) / len(prompts))
        return sum_reward(prompts, completion_ids)

    trainer = make(talkative, dynamic_sampling_rounds=20)
    trainer.model.train()
    lengths, original = [], trainer._generate_single_turn

    def spy(*args, **kwargs):
        completion_ids, logps = original(*args, **kwargs)
        lengths.append([len(ids) for ids in completion_ids])
        return completion_ids, logps

    trainer._generate_single_turn = spy
    trainer._prepare_inputs([{"prompt": word} for word in ("ba", "be") for _ in range(GROUP)])
    logs, shown = trainer._logs, trainer._metrics["train"]
    assert [prompt[-1] in "eo" for prompt in logs["prompt"]] == [True] * 2 * GROUP
    assert list(logs["extra"]["heard"]) == [
        f"{p}: {c}" for p, c in zip(logs["prompt"], logs["completion"], strict=True)
    ]
    assert len(lengths) > 1
    assert shown["share_flat"] == [0.5]
    assert shown["completions/mean_length"] == [sum(lengths[0]) / len(lengths[0])]
    assert len(shown["reward"]) == 1


def test_a_samplers_log_probs_stay_with_their_completions(make):
    """As vLLM gives them; here each token's is its id, negative."""
    trainer = make(dynamic_sampling_rounds=20)
    trainer.model.train()
    original = trainer._generate_single_turn

    def with_logps(*args, **kwargs):
        completion_ids, _ = original(*args, **kwargs)
        return completion_ids, [[-float(i) for i in ids] for ids in completion_ids]

    trainer._generate_single_turn = with_logps
    trainer._prepare_inputs([{"prompt": word} for word in ("ba", "be") for _ in range(GROUP)])
    assert trainer._metrics["train"]["dynamic_sampling/rounds"][0] > 0
    rows = buffer(trainer)
    expected = -(rows["completion_ids"] * rows["completion_mask"]).float()
    assert torch.equal(rows["sampling_per_token_logps"], expected)


def test_trls_generate_is_what_a_row_is_made_from(make):
    """Eight values, of which plain text prompts leave four empty; TRL's rollout takes them over."""
    assert list(inspect.signature(GRPOTrainer._generate).parameters) == ["self", "prompts"]
    trainer = make()
    trainer.model.train()
    result = GRPOTrainer._generate(trainer, ["ba"] * GROUP)
    prompt_ids, completion_ids, tool_mask, completions, logps, extra, images, tool_images = result
    assert [len(x) for x in (prompt_ids, completion_ids, completions)] == [GROUP] * 3
    assert (tool_mask, logps, extra, images, tool_images) == (None, None, {}, None, [])
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert source.count("self._generate(prompts)") == 1
    assert source.count("self._calculate_rewards(inputs, prompts, completions, completion_id") == 1


def test_every_rollout_batch_tries_the_prompts_in_another_order(make):
    trainer = make(always_flat, **ON)
    orders = []
    for trainer._step in (0, 1, 2, 4):
        orders.append([row["prompt"] for row in trainer._fresh_examples(["ba"])])
    assert all(sorted(order) == sorted(WORDS[1:]) for order in orders)
    assert orders[0] == orders[1]  # two micro-steps of the same batch
    assert orders[1] != orders[2] != orders[3]
    other = make(always_flat, **ON, seed=2)
    assert [row["prompt"] for row in other._fresh_examples(["ba"])] != orders[0]


@pytest.mark.parametrize("method", ["grpo", "ar and lopti"])
def test_resuming_from_any_step_ends_with_the_same_bits(make, method):
    fields = {**METHODS[method], **ON, **EVERY_STEP, "max_steps": 8}
    whole = make(prompts=WORDS[:8], **fields)
    whole.train()
    expected, expected_log = final_state(whole), logged(whole)
    assert sum(row.get("dynamic_sampling/rounds", 0) for row in expected_log) > 2
    for step in range(1, 8):
        resumed = make(prompts=WORDS[:8], **{**fields, "save_strategy": "no"})
        torch.manual_seed(step)
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{step}")
        assert_equal_states(final_state(resumed), expected)
        assert logged(resumed) == expected_log


# Over two processes


def run_of_rank(world_size: int, make, rounds: int, num_generations: int, seed: int = 3) -> dict:
    """Train on completions that depend on prompt and generation alone, 12 a rollout batch.

    On two ranks the second of three groups is on both.
    """
    trainer = make(
        per_device_train_batch_size=12 // world_size,
        steps_per_generation=1,
        max_steps=6,
        ar_alpha=0.3,
        lopti_eta=0.5,
        dynamic_sampling_rounds=rounds,
        num_generations=num_generations,
        prompts=WORDS[:24],
        seed=seed,
    )
    assert trainer.accelerator.num_processes == world_size

    def scripted(prompt_ids, *args, **kwargs):
        first = len(prompt_ids) * trainer.accelerator.process_index
        return [
            [
                3 + (7 * sum(ids) + 5 * ((first + i) % num_generations) + 3 * j) % 26
                for j in range(3)
            ]
            + [1]
            for i, ids in enumerate(prompt_ids)
        ], None

    trainer._generate_single_turn = scripted
    batches = keep_batches(trainer)
    trainer.train()
    prompts = [texts(trainer, batch, "prompt") for batch in batches]
    return {
        "parameters": {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
        "log": logged(trainer),
        "prompts": prompts,
    }


forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def redraws(run: dict) -> list[dict]:
    """Of each rollout batch, what was logged of dynamic sampling."""
    return [
        {name.split("/")[1]: value for name, value in row.items() if name.startswith("dynamic")}
        for row in run["log"]
        if "dynamic_sampling/rounds" in row
    ]


@forks
@pytest.mark.parametrize("rounds", [1, 20])
def test_two_processes_replace_the_same_groups_as_one(make, tmp_path, rounds):
    [single] = run_ranks(run_of_rank, tmp_path / "one", 1, make, rounds, GROUP)
    first, second = run_ranks(run_of_rank, tmp_path / "two", 2, make, rounds, GROUP)
    for ours, one, two in zip(single["prompts"], first["prompts"], second["prompts"], strict=True):
        assert sorted(ours) == sorted(one + two)
        assert len(one) == len(two) == 6
    for rank in (first, second):
        for name, expected in single["parameters"].items():
            torch.testing.assert_close(rank["parameters"][name], expected, rtol=0, atol=1e-5)
        for ours, expected in zip(rank["log"], single["log"], strict=True):
            # every process watches rows of its own for these two
            ours, expected = (
                {k: v for k, v in row.items() if not k.startswith(("prob/rose", "prob/tied"))}
                for row in (ours, expected)
            )
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)
    rows = redraws(single)
    assert len(rows) == 3
    assert any(row["flat_drawn"] == pytest.approx(2 / 3) for row in rows)
    assert (max(row["flat_left"] for row in rows) > 0) == (rounds == 1)


@forks
def test_groups_that_do_not_fill_two_processes_are_redrawn_in_pairs(make, tmp_path):
    first, second = run_ranks(run_of_rank, tmp_path / "two", 2, make, 20, 3, 4)
    assert redraws(first) == redraws(second)
    odd = [row for row in redraws(first) if round(row["flat_drawn"] * 4) % 2]
    assert odd
    for row in redraws(first):
        assert row["completions"] % 6 == 0
        assert row["completions"] >= row["flat_drawn"] * 12
        assert row["flat_left"] == 0
    for one, two in zip(first["prompts"], second["prompts"], strict=True):
        assert len(one) == len(two) == 6
        assert sorted(Counter(one + two).values()) == [3, 3, 3, 3]
    for name, expected in first["parameters"].items():
        assert torch.equal(second["parameters"][name], expected)


# Soft overlong punishment


def test_overlong_completions_are_punished_as_dapo_says(rollout_with_cache):
    trainer, batch = rollout_with_cache  # 8 tokens at most, a cache of 4
    lengths = batch["completion_mask"].sum(1).tolist()
    assert {1, 8} <= set(lengths) or len(set(lengths)) > 2
    punishments = trainer._logs["rewards"]["soft_overlong_punishment_reward"]
    expected = {n: max(-1.0, min(0.0, (4 - n) / 4)) for n in range(1, 9)}
    assert expected[4] == 0
    assert expected[5] == -0.25
    assert expected[8] == -1
    assert sorted(punishments) == sorted(expected[n] for n in lengths)
    assert min(punishments) == -1


@pytest.fixture
def rollout_with_cache(rollout):
    trainer, _ = rollout(overlong_cache=4)
    return trainer, buffer(trainer)


def test_the_punishment_is_one_more_reward_with_a_weight_of_its_own(make_trainer):
    fields = {"overlong_cache": 4, "reward_weights": [1.0, 0.5]}
    trainer = make_trainer(max_steps=1, **fields)
    trainer.train()
    row = trainer.state.log_history[0]
    names = ("letters_reward", "soft_overlong_punishment_reward")
    letters, punishment = (row[f"rewards/{name}/mean"] for name in names)
    assert -1 <= punishment < -0.1
    assert row["reward"] == pytest.approx(letters + 0.5 * punishment)


# What cannot work


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantage": "ppo"}, "advantage='ppo' is unknown. Use one of grpo, reinforce_plus_plus"),
        (
            {"advantage": "reinforce_plus_plus"},
            "scale_rewards=group is not what.*Set scale_rewards to batch",
        ),
        (
            {"advantage": "reinforce_plus_plus", "scale_rewards": "none"},
            "scale_rewards=none is not what.*Set scale_rewards to batch",
        ),
        (
            {
                "advantage": "reinforce_plus_plus",
                "scale_rewards": "batch",
                "multi_objective_aggregation": "normalize_then_sum",
            },
            "Set multi_objective_aggregation to sum_then_normalize",
        ),
        (
            {
                "advantage": "reinforce_plus_plus",
                "scale_rewards": "batch",
                "dynamic_sampling_rounds": 2,
            },
            "dynamic_sampling_rounds=2 replaces groups.*to 0, or advantage to grpo",
        ),
        ({"dynamic_sampling_rounds": -1}, "dynamic_sampling_rounds=-1 is below 0. Use 0"),
        (
            {"overlong_cache": 0, "max_completion_length": 100},
            r"overlong_cache=0 is outside 1\.\.100.*20, as DAPO",
        ),
        (
            {"overlong_cache": 101, "max_completion_length": 100},
            r"overlong_cache=101 is outside 1\.\.100",
        ),
    ],
)
def test_bad_values_raise_and_name_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


@pytest.mark.parametrize("methods", [{}, {"ar_alpha": 0.1, "lopti_eta": 0.5}])
def test_the_controls_combine_with_the_methods(methods):
    assert config(advantage="reinforce_plus_plus", scale_rewards="batch", **methods)
    assert config(dynamic_sampling_rounds=3, overlong_cache=10, **methods)


def test_the_options_are_flags_of_the_train_command(tmp_path):
    options = [
        "--config",
        "kk_tiny_cpu.yaml",
        "--dynamic_sampling_rounds",
        "3",
        "--overlong_cache",
        "44",
    ]
    options += ["--curriculum_column", "num_people", "--curriculum_levels", "3", "5", "7"]
    options += ["--curriculum_success_rate", "0.6", "--curriculum_success_reward", "3"]
    _, args, _ = parse_args([*options, "--output_dir", str(tmp_path)])
    assert (args.dynamic_sampling_rounds, args.overlong_cache) == (3, 44)
    assert (args.curriculum_column, args.curriculum_levels) == ("num_people", [3, 5, 7])
    assert (args.curriculum_success_rate, args.curriculum_success_reward) == (0.6, 3)
    _, args, _ = parse_args([*options, "--overlong_cache", "none", "--output_dir", str(tmp_path)])
    assert args.overlong_cache is None


class NoModel:
    """Loading it would fail: the data are checked before."""


@pytest.mark.parametrize(
    ("columns", "extras", "message"),
    [
        (None, {}, "dynamic_sampling_rounds=3 picks prompts by number.*without streaming"),
        (["prompt", "image"], {}, "plain text prompts, found image. Set dynamic_sampling_rounds"),
        (["prompt"], {"tools": [len]}, "plain text prompts, found tools"),
        (["prompt"], {"rollout_func": len}, "plain text prompts, found rollout_func"),
    ],
)
def test_data_that_cannot_be_redrawn_raise_before_the_model_loads(columns, extras, message):
    dataset = Dataset.from_dict({name: ["x"] for name in columns or ["prompt"]})
    if columns is None:
        dataset = dataset.to_iterable_dataset()
    with pytest.raises(ValueError, match=message):
        LoptiGRPOTrainer(NoModel, letters_reward, config(**ON), train_dataset=dataset, **extras)
