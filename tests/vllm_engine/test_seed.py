"""`seed` decides the rollouts of a colocated engine, from the first batch and after a resume."""

import itertools

import pytest
import torch
from trl import GRPOTrainer
from vllm import SamplingParams

from lopti_trl.engines import hash_seed

STEPS = 8  # two rollout batches of two micro-batches in two phases
SAME_PROMPTS = {"shuffle_dataset": False}


def groups(trainer) -> list[list[list[int]]]:
    """Completions of each prompt of each rollout batch."""
    found = []
    for rows, completions in zip(trainer.rollouts, trainer.completions(), strict=True):
        by_prompt = {}
        for prompt, completion in zip(rows["prompt_ids"].tolist(), completions, strict=True):
            by_prompt.setdefault(str(prompt), []).append(completion)
        found += by_prompt.values()
    return found


def test_equal_seeds_give_equal_rollouts_and_others_do_not(make_trainer):
    runs = []
    for seed in (1, 1, 2):
        trainer = make_trainer(max_steps=STEPS, seed=seed, temperature=1.5, **SAME_PROMPTS)
        torch.manual_seed(len(runs))  # whatever else has drawn
        trainer.train()
        runs.append(trainer)
    first, again, other = (trainer.completions() for trainer in runs)
    assert first == again
    assert sorted(first[0]) != sorted(other[0])  # the order of rows follows the seed in any case
    assert sorted(first[1]) != sorted(other[1])
    for trainer in runs:
        for group in groups(trainer):
            assert len({tuple(ids) for ids in group}) > 1


def test_a_rollout_batch_of_the_same_prompts_and_weights_is_another_sample(make_trainer):
    trainer = make_trainer(max_steps=STEPS, learning_rate=0.0)
    trainer.train_dataset = trainer.train_dataset.select(range(2))
    trainer.train()
    first, second = trainer.completions()
    assert sorted(first) != sorted(second)


class PlainTrainer(GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        self.generated = super()._generate_single_turn(*args, **kwargs)[0]
        return self.generated, None


def test_trl_ignores_the_seed(make_trainer):
    """Why ours sets it; delete both when this fails."""
    runs = []
    for seed in (1, 2):
        trainer = make_trainer(
            PlainTrainer,
            seed=seed,
            max_steps=1,
            vllm_importance_sampling_correction=False,
            **SAME_PROMPTS,
        )
        trainer.train()
        runs.append(trainer.generated)
    assert runs[0] == runs[1]


def test_a_seed_in_generation_kwargs_is_refused_since_it_makes_groups_of_copies(make_trainer):
    with pytest.raises(ValueError, match="every completion of a group the same"):
        make_trainer(generation_kwargs={"seed": 1})
    engine = make_trainer().vllm_generation.llm
    outputs = engine.generate(
        [{"prompt_token_ids": [5, 6, 7]}] * 4,
        sampling_params=SamplingParams(seed=1, max_tokens=12, n=1),
        use_tqdm=False,
    )
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def final_parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_resuming_goes_on_with_the_same_rollouts_to_the_same_bits(make_trainer, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(max_steps=3 * 4, output_dir=tmp_path / "whole", **saving)
    whole.train()
    expected = final_parameters(whole)
    for step in (2, 4, 7):  # within the first rollout batch, after it, within the second
        resumed = make_trainer(max_steps=3 * 4, output_dir=tmp_path / "resumed")
        torch.manual_seed(step)  # whatever state the new process starts in
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        count = len(resumed.rollouts)
        assert resumed.completions() == whole.completions()[-count:]
        assert count == {2: 2, 4: 2, 7: 1}[step]
        for name, value in final_parameters(resumed).items():
            assert torch.equal(value, expected[name]), (step, name)


def test_seeds_of_rollout_batches_and_engines_do_not_meet():
    places = list(itertools.product(range(8), range(40), range(8)))  # seed, batch, engine
    seeds = {hash_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**32 for seed in seeds)  # what numpy takes
