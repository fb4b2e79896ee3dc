"""Generation by transformers: completions that have ended leave the model's forward pass.

B = prompts of a call of `generate`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMode

EVERY = 8  # tokens between two looks: on a GPU each waits for the device
_PLAIN = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)


def eos_ids(config: GenerationConfig) -> list[int]:
    """Every token that ends a completion by this config, which may name one, several or none."""
    ids = config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


@contextmanager
def finished_rows_leave(model: GenerationMixin, config: GenerationConfig) -> Iterator[None]:
    """Within, `model.generate` with this config computes only completions that have not ended.

    transformers computes every row until the longest has ended. Its loop stays as it is and draws
    as many random numbers; logits of a row that has ended are zeros, and its tokens padding all the
    same. So completions are stock's, but for the rounding of matrices of another size. Does nothing
    for beams, for other caches than a growing one of keys and values, and for image models.
    """
    is_plain = config.get_generation_mode() in _PLAIN and not config.return_dict_in_generate
    if not is_plain or config.prefill_chunk_size or model.config.get_text_config() != model.config:
        yield
        return
    rows = _LiveRows(eos_ids(config))
    hooks = (
        model.register_forward_pre_hook(rows.select, with_kwargs=True),
        model.register_forward_hook(rows.spread),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _LiveRows:
    """Which of the B rows the cache holds, as forward hooks of one token after another."""

    def __init__(self, eos_ids: list[int]):
        self.eos_ids = torch.tensor(eos_ids)
        self._begin()

    def _begin(self):
        """The prompts of a new call of `generate`."""
        self.step = 0
        self.rows: torch.Tensor | None = None  # those in the cache, of B; None: all
        self.ended: torch.Tensor | None = None  # (B,) bool

    def select(self, model, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        ids = kwargs.get("input_ids")
        cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
        if ids is None or not _can_shrink(cache) or not cache.get_seq_length():
            return self._begin()
        is_end = torch.isin(ids[:, -1], self.eos_ids.to(ids.device))
        self.ended = is_end if self.ended is None else self.ended | is_end
        self.step += 1
        if self.step % EVERY == 0:
            self._shrink(cache)
        if self.rows is None:
            return None
        chosen = {
            name: value[self.rows]
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(ids)
            else value
            for name, value in kwargs.items()
        }
        return args, chosen

    def _shrink(self, cache: DynamicCache):
        rows = torch.arange(len(self.ended), device=self.ended.device)
        rows = rows if self.rows is None else self.rows
        live = (~self.ended[rows]).nonzero().flatten()
        if not len(live):
            live = live.new_zeros(1)  # processes that generate in step run to the longest's end
        if len(live) < len(rows):
            cache.batch_select_indices(live)
            self.rows = rows[live]

    def spread(self, model, args: tuple, output):
        if self.rows is not None:
            logits = output.logits
            shape = (len(self.ended), *logits.shape[1:])
            output.logits = logits.new_zeros(shape).index_copy_(0, self.rows, logits)
        return output


def _can_shrink(cache: Cache | None) -> bool:
    return isinstance(cache, DynamicCache) and all(
        isinstance(layer, DynamicLayer) for layer in cache.layers
    )
