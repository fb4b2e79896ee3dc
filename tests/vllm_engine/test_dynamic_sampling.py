"""Extra rounds on a colocated engine: rows, log-probs and weights stay those of the rollout."""

from vllm_engine.conftest import noise_reward
from vllm_engine.test_rollout import EXACT, largest_difference


def half_flat(prompts, completion_ids, **kwargs) -> list[float]:
    """No spread for the prompts of an even length."""
    noise = noise_reward(completion_ids)
    return [x if len(p) % 2 else 0.5 for p, x in zip(prompts, noise, strict=True)]


def test_replaced_groups_carry_the_engines_log_probs(make_trainer):
    runs = []
    for _ in range(2):
        trainer = make_trainer(max_steps=16, dynamic_sampling_rounds=20)
        trainer.reward_funcs = [half_flat]
        trainer.train()
        rows = [row for row in trainer.state.log_history if "dynamic_sampling/rounds" in row]
        assert len(rows) == len(trainer.rollouts) == 4
        assert sum(row["dynamic_sampling/completions"] for row in rows) >= 8
        assert [row["dynamic_sampling/flat_left"] for row in rows] == [0.0] * 4
        for rollout in range(4):
            assert largest_difference(trainer, rollout) < EXACT
        runs.append(trainer.completions())
    assert runs[0] == runs[1]
