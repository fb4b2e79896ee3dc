"""Fields of `LoptiGRPOConfig` on which prompts and rollouts to train, and the rules they keep."""

from dataclasses import dataclass, field
from typing import Literal

from trl import GRPOConfig


@dataclass
class SamplingConfig(GRPOConfig):
    """`trl.GRPOConfig` with sampling controls and REINFORCE++, all off by default."""

    advantage: Literal["grpo", "reinforce_plus_plus"] = field(
        default="grpo",
        metadata={
            "help": "grpo: the reward against its group's. reinforce_plus_plus: the reward "
            "whitened over all valid tokens of the rollout batch; needs scale_rewards=batch."
        },
    )
    dynamic_sampling_rounds: int = field(
        default=0,
        metadata={
            "help": "Dynamic sampling: groups whose rewards do not spread are replaced by groups "
            "of fresh prompts, in at most this many extra rounds a rollout batch. 0 disables it."
        },
    )
    overlong_cache: int | None = field(
        default=None,
        metadata={
            "help": "DAPO's soft overlong punishment: over the last overlong_cache tokens before "
            "max_completion_length a further reward falls from 0 to -1. It is the last of the "
            "reward functions, for reward_weights too. None disables it."
        },
    )
    curriculum_column: str | None = field(
        default=None,
        metadata={
            "help": "Curriculum: column of the data set with a prompt's difficulty, a number "
            "(num_people for K&K); easy prompts come first. None disables it."
        },
    )
    curriculum_levels: list[float] | None = field(
        default=None,
        metadata={
            "help": "Highest difficulty of each level, increasing. None makes every difficulty "
            "that occurs a level."
        },
    )
    curriculum_batches: int | None = field(
        default=None,
        metadata={"help": "Curriculum by step: rollout batches until the next level."},
    )
    curriculum_success_rate: float | None = field(
        default=None,
        metadata={
            "help": "Curriculum by success: the next level comes after a rollout batch in which "
            "this share, in (0, 1], of the completions at the newest level succeeded."
        },
    )
    curriculum_success_reward: float | None = field(
        default=None,
        metadata={"help": "Reward from which a completion succeeded: 3 for K&K, 1 for maths."},
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_advantage()
        self._check_rounds()
        self._check_curriculum()

    def _check_advantage(self):
        if self.advantage not in ("grpo", "reinforce_plus_plus"):
            raise ValueError(
                f"advantage={self.advantage!r} is unknown. Use one of grpo, reinforce_plus_plus."
            )
        if self.advantage == "grpo":
            return
        if self.scale_rewards != "batch":
            raise ValueError(
                f"scale_rewards={self.scale_rewards} is not what advantage=reinforce_plus_plus "
                "does: it divides by the standard deviation over the whole batch. Set "
                "scale_rewards to batch."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"multi_objective_aggregation={self.multi_objective_aggregation} normalises each "
                "reward within its group, advantage=reinforce_plus_plus the sum over the batch. "
                "Set multi_objective_aggregation to sum_then_normalize."
            )
        if self.dynamic_sampling_rounds:
            raise ValueError(
                f"dynamic_sampling_rounds={self.dynamic_sampling_rounds} replaces groups that "
                "teach GRPO nothing, but advantage=reinforce_plus_plus learns from them too. Set "
                "dynamic_sampling_rounds to 0, or advantage to grpo."
            )

    def _check_rounds(self):
        if self.dynamic_sampling_rounds < 0:
            raise ValueError(
                f"dynamic_sampling_rounds={self.dynamic_sampling_rounds} is below 0. Use 0 to turn "
                "dynamic sampling off, or the number of extra rounds that a rollout batch may take."
            )
        cache, longest = self.overlong_cache, self.max_completion_length
        if cache is not None and not 0 < cache <= longest:
            raise ValueError(
                f"overlong_cache={cache} is outside 1..{longest}, the tokens of a completion "
                f"(max_completion_length). Use a fifth of it, {max(longest // 5, 1)}, as DAPO "
                "does, or None to turn the punishment off."
            )

    def _check_curriculum(self):
        options = {
            name: getattr(self, f"curriculum_{name}")
            for name in ("levels", "batches", "success_rate", "success_reward")
        }
        given = [f"curriculum_{name}={value}" for name, value in options.items() if value]
        if self.curriculum_column is None:
            if given:
                raise ValueError(
                    f"{', '.join(given)} does nothing without curriculum_column. Set it to the "
                    "data set's column of difficulties, for example num_people."
                )
            return
        levels, rate = self.curriculum_levels, self.curriculum_success_rate
        if (self.curriculum_batches is None) == (rate is None):
            raise ValueError(
                f"curriculum_column={self.curriculum_column} needs to know when to rise: "
                f"curriculum_batches={self.curriculum_batches} (by step) and "
                f"curriculum_success_rate={rate} (by success). Set one of the two."
            )
        if self.curriculum_batches is not None and self.curriculum_batches < 1:
            raise ValueError(
                f"curriculum_batches={self.curriculum_batches}, but a level takes at least one "
                "rollout batch. Set it to 1 or more."
            )
        if rate is not None and not 0 < rate <= 1:
            raise ValueError(
                f"curriculum_success_rate={rate} is outside (0, 1]: it is a share of completions. "
                "Use a value in between, for example 0.6."
            )
        if (rate is None) != (self.curriculum_success_reward is None):
            raise ValueError(
                f"curriculum_success_rate={rate} and curriculum_success_reward="
                f"{self.curriculum_success_reward} belong together: the share of completions with "
                "at least that reward. Set both (a reward of 3 for K&K, 1 for maths), or neither."
            )
        if levels is not None and (not levels or levels != sorted(set(levels))):
            raise ValueError(
                f"curriculum_levels={levels} do not increase. Give the highest difficulty of each "
                "level, for example [3, 5, 7], or None for every difficulty that occurs."
            )
