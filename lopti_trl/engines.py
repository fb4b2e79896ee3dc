"""Engines that complete prompts: a transformers model, vLLM, or a trainer's own way to generate.

An engine is called with the token ids of some prompts, how to sample, and a seed (a few integers,
different for every call); it returns one completion for each prompt as token ids, cut after the
first end-of-sequence token. `eos_ids` are these tokens, and `batch_tokens` is how many tokens,
prompts and completions, one process takes at a time.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from transformers import GenerationConfig

from lopti_trl.generation import eos_ids, finished_rows_leave


class Sampling(NamedTuple):
    """How to draw completions."""

    max_tokens: int
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all tokens

    def transformers_kwargs(self) -> dict:
        """For GenerationConfig. All is said, or the model's own generation_config would fill in."""
        is_greedy = self.temperature == 0
        return {
            "max_new_tokens": self.max_tokens,
            "repetition_penalty": 1.0,
            "do_sample": not is_greedy,
            # greedy: the defaults of transformers, which warns of others
            "temperature": 1.0 if is_greedy else self.temperature,
            "top_p": 1.0 if is_greedy else self.top_p,
            "top_k": 50 if is_greedy else self.top_k,
        }

    def vllm_kwargs(self) -> dict:
        """For vLLM's SamplingParams."""
        return {**self._asdict(), "repetition_penalty": 1.0}


def hash_seed(*numbers: int) -> int:
    """A 32-bit seed that depends on every number."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Within, random numbers may be drawn and generators seeded; afterwards nothing shows of it."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def replaced(thing, **values) -> Iterator[None]:
    """Within, attributes of `thing` have other values."""
    before = {name: getattr(thing, name) for name in values}
    vars(thing).update(values)
    try:
        yield
    finally:
        vars(thing).update(before)


def cut_after_eos(ids: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """The tokens up to the first end of sequence, included."""
    end = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids))
    return list(ids[: end + 1])


def end_ids(generation_config: GenerationConfig, tokenizer) -> list[int]:
    """Every token that ends a completion: of the model's generation_config and the tokenizer."""
    return sorted({*eos_ids(generation_config), tokenizer.eos_token_id})


class TransformersEngine:
    """`model.generate`; every process has a model of its own."""

    def __init__(self, model, tokenizer, batch_tokens: int = 65_536):
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens
        self.eos_ids = end_ids(model.generation_config, tokenizer)

    def __call__(
        self, prompt_ids: list[list[int]], sampling: Sampling, seed: Sequence[int]
    ) -> list[list[int]]:
        inputs = self.tokenizer.pad(
            {"input_ids": prompt_ids}, padding_side="left", return_tensors="pt"
        ).to(self.model.device)
        config = GenerationConfig(
            eos_token_id=self.eos_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            disable_compile=True,
            **sampling.transformers_kwargs(),
        )
        was_training = self.model.training
        self.model.eval()
        torch.manual_seed(hash_seed(*seed, PartialState().process_index))
        with torch.inference_mode(), finished_rows_leave(self.model, config):
            ids = self.model.generate(**inputs, generation_config=config)
        self.model.train(was_training)
        completions = ids[:, inputs["input_ids"].size(1) :].tolist()
        return [cut_after_eos(row, self.eos_ids) for row in completions]


class TrainerEngine:
    """As a GRPO trainer makes its rollouts, so with its vLLM, DeepSpeed or FSDP; only the sampling
    differs. Every process has to call it at the same time, with as many prompts."""

    def __init__(self, trainer):
        args, self.trainer = trainer.args, trainer
        self.eos_ids = trainer.eos_token_ids
        # vLLM queues what does not fit; for the others there is room for as much as a rollout batch
        rows = args.per_device_train_batch_size * args.steps_per_generation
        rollout = max(16_384, rows * args.max_completion_length)
        self.batch_tokens = 4_194_304 if trainer.use_vllm else rollout

    def __call__(
        self, prompt_ids: list[list[int]], sampling: Sampling, seed: Sequence[int]
    ) -> list[list[int]]:
        trainer, process = self.trainer, self.trainer.accelerator.process_index
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            names = {"max_tokens": "max_completion_length"}
            values = {names.get(k, k): value for k, value in sampling.vllm_kwargs().items()}
            process //= trainer.vllm_tensor_parallel_size  # the processes of an engine draw alike
        else:
            engine = trainer
            kwargs = {**trainer.generation_kwargs, "min_p": None, **sampling.transformers_kwargs()}
            config = GenerationConfig(**kwargs, disable_compile=True)
            values = {"generation_config": config, "generation_kwargs": kwargs}
        was_training = trainer.model.training
        trainer.model.eval()
        torch.manual_seed(hash_seed(*seed, process))
        with replaced(engine, min_p=None, **values):
            completions, _ = trainer._generate_single_turn(prompt_ids, None, {}, 1)
        trainer.model.train(was_training)
        return completions


class VLLMEngine:
    """vLLM in this process; it spreads over GPUs by `tensor_parallel_size` and no other way."""

    def __init__(self, model: str, tokenizer, batch_tokens: int = 4_194_304, **options):
        if PartialState().num_processes > 1:
            raise ValueError(
                f"vLLM evaluates in one process, but {PartialState().num_processes} were launched. "
                "Launch one, and spread it by vllm_tensor_parallel_size."
            )
        if (Path(model) / "adapter_config.json").is_file():
            raise ValueError(
                f"{model} is an adapter, which vLLM does not load here. Merge it into its model "
                "(peft: merge_and_unload), or set engine to transformers."
            )
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError(
                "engine=vllm, but vLLM is not installed. Install it (pip install "
                "'lopti-trl[vllm]'), or set engine to transformers."
            ) from error
        self.llm = LLM(model, **options)
        self.batch_tokens = batch_tokens
        self.eos_ids = end_ids(read_generation_config(model, options.get("revision")), tokenizer)

    def __call__(
        self, prompt_ids: list[list[int]], sampling: Sampling, seed: Sequence[int]
    ) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                **sampling.vllm_kwargs(),
                seed=hash_seed(*seed, row) if sampling.temperature else None,
                stop_token_ids=self.eos_ids,
                detokenize=False,
            )
            for row in range(len(prompt_ids))
        ]
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def read_generation_config(model: str, revision: str | None) -> GenerationConfig:
    """A model's generation_config.json, which it need not have."""
    try:
        return GenerationConfig.from_pretrained(model, revision=revision)
    except OSError:
        return GenerationConfig()
