"""Easy prompts first: a sampler whose rollout batches grow harder by step or by success."""

import copy
from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler


def take_easy(
    waiting: Sequence[int],  # prompts left in the epoch, in its random order
    difficulties: Sequence[float],  # of every prompt
    bound: float,  # difficulty that is allowed
    count: int,
) -> list[int]:
    """The first `count` waiting prompts within the bound; if they run out, the easiest others."""
    return sorted(waiting, key=lambda prompt: max(difficulties[prompt], bound))[:count]


class CurriculumSampler(Sampler):
    """TRL's `RepeatSampler` with the prompts of an epoch in another order.

    An epoch still holds each prompt once, an incomplete rollout batch is dropped, and the rows of a
    batch are laid out as TRL does. A rollout batch has a level; it takes prompts up to the level's
    bound, in the epoch's random order. With one level it is `RepeatSampler`.
    """

    def __init__(
        self,
        sampler: RepeatSampler,
        difficulties: Sequence[float],
        bounds: Sequence[float],  # highest difficulty of each level, increasing
        batches_per_level: int | None = None,  # by step
        success_rate: float | None = None,  # by success
    ):
        self.difficulties = difficulties
        self.bounds = list(bounds)
        self.batches_per_level = batches_per_level
        self.success_rate = success_rate
        self.epoch = 0  # iterations begun, as TRL's generator draws an order at each
        self.reached = 0  # level by success, now
        self.history = []  # level by success of each rollout batch, as it was drawn
        self._sampler = sampler
        self._order = copy.copy(sampler)  # the epoch's prompts; shares the generator
        self._order.batch_size = self._order.mini_repeat_count = self._order.repeat_count = 1
        self._layout = copy.copy(sampler)  # positions in a rollout batch
        self._layout.num_samples, self._layout.shuffle = sampler.batch_size, False

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        waiting = list(self._order)
        size = self._sampler.batch_size
        num_batches = len(waiting) // size
        first, self.epoch = self.epoch * num_batches, self.epoch + 1
        for batch in range(first, first + num_batches):
            bound = self.bounds[self.level(batch)]
            prompts = take_easy(waiting, self.difficulties, bound, size)
            taken = set(prompts)
            waiting = [prompt for prompt in waiting if prompt not in taken]
            for position in self._layout:
                yield prompts[position]

    def level(self, batch: int) -> int:
        """Of a rollout batch, counted from the start of the run.

        By success it is decided when the batch is first asked for, which a data loader does ahead
        of time, and stays: a resumed run skips through the same batches.
        """
        if self.batches_per_level is not None:
            return min(batch // self.batches_per_level, len(self.bounds) - 1)
        self.history += [self.reached] * (batch + 1 - len(self.history))
        return self.history[batch]

    def allows(self, prompt: int, batch: int) -> bool:
        return self.difficulties[prompt] <= self.bounds[self.level(batch)]

    def is_at_the_top(self, difficulty: float) -> bool:
        """Whether the success on such a prompt decides on the next level."""
        easiest = self.bounds[self.reached - 1] if self.reached else float("-inf")
        return easiest < difficulty <= self.bounds[self.reached]

    def observe(self, num_successes: float, num_completions: float) -> None:
        """Rise a level if these completions of top prompts succeeded often enough."""
        if num_completions and num_successes / num_completions >= self.success_rate:
            self.reached = min(self.reached + 1, len(self.bounds) - 1)


def level_bounds(difficulties: Sequence[float], bounds: Sequence[float] | None) -> list[float]:
    """The levels' bounds: as given, or each difficulty that occurs."""
    if bounds is None:
        return sorted(set(difficulties))
    if max(difficulties) > bounds[-1]:
        raise ValueError(
            f"curriculum_levels={bounds} ends below the hardest prompt, of difficulty "
            f"{max(difficulties):g}. Let the last level reach it, or filter the data set."
        )
    return list(bounds)
