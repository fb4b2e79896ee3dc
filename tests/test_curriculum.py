"""Levels 1, 2 and 4: the curriculum keeps TRL's layout, rises as told, and resumes exactly."""

import itertools
import random

import pytest
import torch
from conftest import letters_reward
from datasets import Dataset
from ranks import run_ranks
from test_config import config
from test_off_is_grpo import assert_same_training
from test_resume import EVERY_STEP, assert_equal_states, final_state, logged
from test_sampling import GROUP, WORDS, NoModel
from trl.trainer.utils import RepeatSampler

from lopti_trl import LoptiGRPOTrainer
from lopti_trl.curriculum import CurriculumSampler, level_bounds, take_easy

# Which prompts


def test_allowed_prompts_come_in_the_epochs_order_then_the_easiest_others():
    difficulties = [5, 3, 4, 3, 5, 4]
    waiting = [0, 2, 1, 5, 3, 4]
    assert take_easy(waiting, difficulties, 3, 2) == [1, 3]
    assert take_easy(waiting, difficulties, 4, 2) == [2, 1]
    assert take_easy(waiting, difficulties, 5, 6) == waiting
    assert take_easy(waiting, difficulties, 3, 5) == [1, 3, 2, 5, 0]  # two at 3, then 4, 4, 5


def trls(num_prompts: int, seed: int = 7, shuffle: bool = True) -> RepeatSampler:
    return RepeatSampler(
        range(num_prompts),
        mini_repeat_count=2,
        batch_size=3,
        repeat_count=2,
        shuffle=shuffle,
        seed=seed,
    )


def batches(rows: list[int]) -> list[list[int]]:
    """The prompts of each rollout batch: 3 prompts, twice in a row, the whole twice."""
    assert len(rows) % 12 == 0
    parts = [rows[i : i + 12] for i in range(0, len(rows), 12)]
    for part in parts:
        assert part[:6] == part[6:]
        assert part[0:6:2] == part[1:6:2]
    return [part[0:6:2] for part in parts]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_prompts", [3, 10, 12])
def test_with_one_level_it_is_trls_sampler_epoch_for_epoch(num_prompts, shuffle):
    ours = CurriculumSampler(
        trls(num_prompts, shuffle=shuffle), [1.0] * num_prompts, [1.0], batches_per_level=1
    )
    theirs = trls(num_prompts, shuffle=shuffle)
    assert len(ours) == len(theirs)
    for _ in range(3):
        rows = list(ours)
        assert rows == list(theirs)
        assert len(rows) == len(ours)


def test_by_step_the_levels_open_after_so_many_rollout_batches():
    difficulties = [3 + i % 3 for i in range(18)]  # six prompts of 3, 4 and 5 each
    sampler = CurriculumSampler(trls(18), difficulties, [3, 4, 5], batches_per_level=2)
    first = batches(list(sampler))
    assert [[difficulties[i] for i in batch] for batch in first[:2]] == [[3, 3, 3], [3, 3, 3]]
    assert {difficulties[i] for batch in first[2:4] for i in batch} == {4}  # those of 3 are gone
    assert sorted(itertools.chain(*first)) == list(range(18))
    assert [sampler.level(batch) for batch in range(8)] == [0, 0, 1, 1, 2, 2, 2, 2]
    second = batches(list(sampler))  # the seventh rollout batch and on: everything is open
    plain = trls(18)
    list(plain)
    assert second == batches(list(plain))


def test_an_open_level_mixes_with_the_easier_ones_in_random_order():
    difficulties = [i // 30 for i in range(60)]
    sampler = CurriculumSampler(trls(60), difficulties, [0, 1], batches_per_level=5)
    later = [difficulties[i] for batch in batches(list(sampler))[5:] for i in batch]
    assert later.count(0) == 15
    assert later[:30] != sorted(later[:30])


def test_by_success_the_level_of_a_batch_is_that_of_its_draw():
    difficulties = [i % 2 for i in range(18)]
    sampler = CurriculumSampler(trls(18), difficulties, [0, 1], success_rate=0.5)
    rows, drawn = iter(sampler), []

    def next_batch() -> list[int]:
        drawn.append(batches(list(itertools.islice(rows, 12)))[0])
        return [difficulties[i] for i in drawn[-1]]

    assert next_batch() == [0, 0, 0]
    sampler.observe(2, 6)
    assert sampler.reached == 0
    assert next_batch() == [0, 0, 0]
    sampler.observe(3, 6)
    assert sampler.reached == 1
    sampler.observe(6, 6)  # there is no level above
    sampler.observe(0, 0)
    assert sampler.reached == 1
    later = [next_batch() for _ in range(4)]
    assert list(itertools.chain(*later)).count(0) == 3
    assert sorted(itertools.chain(*drawn)) == list(range(18))
    assert sampler.history == [0, 0, 1, 1, 1, 1]
    # another one with this history skips through the same rows, whatever it has reached
    again = CurriculumSampler(trls(18), difficulties, [0, 1], success_rate=0.5)
    again.history = [0, 0, 1, 1]
    assert batches(list(itertools.islice(iter(again), 48))) == drawn[:4]


def test_success_counts_at_the_newest_level_only():
    sampler = CurriculumSampler(trls(6), [3, 4, 5, 6, 7, 7], [4, 6, 7], success_rate=1.0)
    assert [sampler.is_at_the_top(d) for d in (3, 4, 5)] == [True, True, False]
    sampler.observe(1, 1)
    assert [sampler.is_at_the_top(d) for d in (4, 5, 6, 7)] == [False, True, True, False]
    assert sampler.allows(3, batch=0)


def test_levels_are_the_difficulties_that_occur_or_as_given():
    assert level_bounds([5, 3, 3, 7], None) == [3, 5, 7]
    assert level_bounds([0.1, 0.9], [0.5, 1.0]) == [0.5, 1.0]
    with pytest.raises(ValueError, match=r"curriculum_levels=\[3, 5\] ends below.*difficulty 7"):
        level_bounds([3, 7], [3, 5])


# In the trainer

SIZES = [2 + i % 3 for i in range(len(WORDS))]
BY_STEP = {"curriculum_column": "size", "curriculum_batches": 2}
BY_SUCCESS = {
    "curriculum_column": "size",
    "curriculum_success_rate": 0.5,
    "curriculum_success_reward": 1.0,
}


def reward_by_size(size, **kwargs) -> list[float]:
    """Half of the completions succeed, at the smallest two sizes."""
    return [float(i % 2) if n < 4 else 0.0 for i, n in enumerate(size)]


@pytest.fixture
def make(make_trainer):
    """A trainer with a reward of the test's own and 40 prompts of sizes 2 to 4."""

    def build(reward=letters_reward, num_prompts=40, sizes=SIZES, **fields):
        columns = {"prompt": WORDS[:num_prompts], "size": sizes[:num_prompts]}
        dataset = Dataset.from_dict(columns)
        return make_trainer(reward_funcs=reward, train_dataset=dataset, **fields)

    return build


def keep_sizes(trainer) -> list[list[int]]:
    """Filled in training: the sizes of the prompts of every rollout batch, of this process."""
    kept, original = [], trainer._generate_and_score_completions

    def spy(inputs):
        kept.append([row["size"] for row in inputs])
        return original(inputs)

    trainer._generate_and_score_completions = spy
    return kept


def test_one_difficulty_trains_to_the_bits_of_no_curriculum(make):
    runs = []
    for fields in ({}, BY_STEP):
        trainer = make(sizes=[3] * len(WORDS), max_steps=6, **fields)
        trainer.train()
        runs.append(trainer)
    assert_same_training(*runs)


def test_by_step_easy_prompts_come_first_and_the_level_is_logged(make):
    trainer = make(max_steps=12, **BY_STEP)  # six rollout batches of two prompts
    kept = keep_sizes(trainer)
    trainer.train()
    assert [max(sizes) for sizes in kept[:2]] == [2, 2]
    assert [max(sizes) <= 3 for sizes in kept[2:4]] == [True, True]
    levels = [row["curriculum/level"] for row in logged(trainer)]
    assert levels == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("lopti", [{}, {"lopti_eta": 0.5}])
def test_by_success_the_level_rises_until_success_fails(make, lopti):
    trainer = make(reward_by_size, max_steps=16 * (2 if lopti else 1), **BY_SUCCESS, **lopti)
    kept = keep_sizes(trainer)
    trainer.train()
    assert set(kept[0]) == {2}
    assert trainer._curriculum.reached == 2  # sizes 2 and 3 succeed, 4 never
    assert trainer._curriculum.history[:2] == [0, 1]  # no batch is drawn ahead of the buffer's end
    assert max(max(sizes) for sizes in kept) == 4


def test_a_share_short_of_the_rate_keeps_the_level(make):
    fields = {**BY_SUCCESS, "curriculum_success_rate": 0.75}
    trainer = make(reward_by_size, max_steps=8, **fields)
    trainer.train()
    assert trainer._curriculum.reached == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("curriculum", [BY_STEP, BY_SUCCESS], ids=["step", "success"])
def test_resuming_from_any_step_ends_with_the_same_bits(make, curriculum, num_workers):
    steps = (3, 6, 11) if num_workers else (1, 2, 3, 7, 11, 12, 13)
    fields = {**curriculum, **EVERY_STEP, "max_steps": 14, "ar_alpha": 0.3}
    fields["dataloader_num_workers"] = num_workers
    if curriculum is BY_STEP:
        fields["dynamic_sampling_rounds"] = 2
    # 12 prompts: six rollout batches an epoch, so the run goes on into the second
    whole = make(reward_by_size, num_prompts=12, **fields)
    whole.train()
    expected, expected_log = final_state(whole), logged(whole)
    assert {row["curriculum/level"] for row in expected_log} == {0, 1, 2}
    for step in steps:
        resumed = make(reward_by_size, num_prompts=12, **{**fields, "save_strategy": "no"})
        torch.manual_seed(step)
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{step}")
        assert_equal_states(final_state(resumed), expected)
        assert logged(resumed) == expected_log


def test_fresh_prompts_of_dynamic_sampling_are_within_the_level(make):
    def flat(completions, **kwargs):
        return [0.0] * len(completions)

    trainer = make(flat, max_steps=6, dynamic_sampling_rounds=50, **BY_STEP)
    drawn, original = [], trainer._calculate_rewards

    def spy(inputs, *args):
        drawn.append((trainer._step, max(row["size"] for row in inputs)))
        return original(inputs, *args)

    trainer._calculate_rewards = spy
    trainer.train()
    for step, top in (0, 2), (2, 2), (4, 3):
        assert {size for at, size in drawn if at == step} <= set(range(2, top + 1))
    # 14 of 40 prompts have size 2: two in the batch, the others two a round, then none is left
    assert sum(at == 0 for at, _ in drawn) == 1 + 6 + 1  # and TRL's own call at the end


def test_extra_rounds_do_not_count_as_success(make):
    """The first draw is flat at no success; the groups that replace it would pass the rate."""

    def reward(prompts, size, **kwargs):
        return [float(i % 2) if p in WORDS[9:] else 0.0 for i, p in enumerate(prompts)]

    trainer = make(reward, dynamic_sampling_rounds=20, **BY_SUCCESS)
    sampler = trainer._get_train_sampler()
    easy = [{"prompt": WORDS[i], "size": 2} for i in (0, 3) for _ in range(GROUP)]
    trainer.model.train()
    trainer._prepare_inputs(easy)
    assert trainer._metrics["train"]["dynamic_sampling/flat_left"] == [0]
    assert sampler.reached == 0
    trainer._step = 2
    easy = [{"prompt": WORDS[i], "size": 2} for i in (9, 12) for _ in range(GROUP)]
    trainer._prepare_inputs(easy)
    assert sampler.reached == 1


def run_of_rank(world_size: int, make) -> dict:
    trainer = make(
        reward_by_size,
        per_device_train_batch_size=12 // world_size,
        steps_per_generation=1,
        max_steps=6,
        **BY_SUCCESS,
    )
    assert trainer.accelerator.num_processes == world_size
    kept = keep_sizes(trainer)
    trainer.train()
    return {"sizes": kept, "history": trainer._curriculum.history}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_two_processes_rise_as_one_does(make, tmp_path):
    [single] = run_ranks(run_of_rank, tmp_path / "one", 1, make)
    first, second = run_ranks(run_of_rank, tmp_path / "two", 2, make)
    assert single["history"] == first["history"] == second["history"]
    assert max(single["history"]) == 2
    for ours, one, two in zip(single["sizes"], first["sizes"], second["sizes"], strict=True):
        assert ours == one + two
        assert len(one) == 6 == GROUP * 3 // 2


# What cannot work


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"curriculum_batches": 5}, "curriculum_batches=5 does nothing without curriculum_column"),
        ({"curriculum_levels": [3, 5]}, r"curriculum_levels=\[3, 5\] does nothing without"),
        ({"curriculum_column": "size"}, "needs to know when to rise.*Set one of the two"),
        ({**BY_STEP, **BY_SUCCESS}, "needs to know when to rise.*Set one of the two"),
        ({**BY_STEP, "curriculum_batches": 0}, "curriculum_batches=0, but.*Set it to 1 or more"),
        (
            {**BY_SUCCESS, "curriculum_success_rate": 60.0},
            r"curriculum_success_rate=60.0 is outside \(0, 1\].*for example 0\.6",
        ),
        (
            {**BY_SUCCESS, "curriculum_success_reward": None},
            "curriculum_success_reward=None belong together.*Set both",
        ),
        (
            {**BY_STEP, "curriculum_success_reward": 1.0},
            "curriculum_success_rate=None and.*belong together",
        ),
        ({**BY_STEP, "curriculum_levels": [5, 3]}, r"curriculum_levels=\[5, 3\] do not increase"),
        ({**BY_STEP, "curriculum_levels": []}, r"curriculum_levels=\[\] do not increase"),
    ],
)
def test_bad_values_raise_and_name_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["x"], "names": ["y"]}, "size is no column.*Use one of prompt, names"),
        ({"prompt": ["x"], "size": ["big"]}, "size holds values that are no numbers"),
        ({"prompt": ["x"], "size": [None]}, "size holds values that are no numbers"),
    ],
)
def test_a_data_set_without_difficulties_raises_before_the_model_loads(columns, message):
    with pytest.raises(ValueError, match=message):
        LoptiGRPOTrainer(
            NoModel, letters_reward, config(**BY_STEP), train_dataset=Dataset.from_dict(columns)
        )


def test_random_curricula_keep_every_epoch_a_permutation():
    rng = random.Random(0)
    for _ in range(50):
        num_prompts = rng.randint(3, 20)
        difficulties = [rng.randint(1, 5) for _ in range(num_prompts)]
        sampler = CurriculumSampler(
            trls(num_prompts, seed=rng.randint(0, 99)),
            difficulties,
            level_bounds(difficulties, None),
            batches_per_level=rng.randint(1, 4),
        )
        for _ in range(2):
            chosen = list(itertools.chain(*batches(list(sampler))))
            assert len(set(chosen)) == len(chosen) == num_prompts // 3 * 3
