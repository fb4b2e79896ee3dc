"""Completions that have ended leave the forward pass; what is generated stays the same."""

import pytest
import torch
from conftest import PROMPTS
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GenerationConfig
from trl import GRPOTrainer

from lopti_trl.engines import Sampling, TransformersEngine
from lopti_trl.generation import EVERY, finished_rows_leave


@pytest.fixture
def model(model_dir):
    """In double precision: rounding of matrices of another size changes no token."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()


def config_of(model, tokenizer, **fields) -> GenerationConfig:
    defaults = {"do_sample": True, "top_k": 0, "max_new_tokens": 60, "disable_compile": True}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return GenerationConfig(**(defaults | ids | fields))


def generate(model, tokenizer, config, leaves: bool) -> tuple[torch.Tensor, list[int], float]:
    """Tokens, rows of every forward pass, and the next random number."""
    inputs = tokenizer(PROMPTS * 2, return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    heights = []
    layer = model.get_input_embeddings()
    hook = layer.register_forward_hook(lambda _, args, output: heights.append(len(args[0])))
    torch.manual_seed(3)
    if leaves:
        with finished_rows_leave(model, config):
            ids = model.generate(**inputs, generation_config=config)
    else:
        ids = model.generate(**inputs, generation_config=config)
    hook.remove()
    return ids, heights, float(torch.rand(()))


@pytest.mark.parametrize(
    "fields", [{}, {"do_sample": False, "top_k": 50}, {"temperature": 0.7, "top_p": 0.9}]
)
def test_completions_and_random_state_are_stocks(model, tokenizer, fields):
    config = config_of(model, tokenizer, **fields)
    stock, stock_heights, stock_random = generate(model, tokenizer, config, leaves=False)
    ours, heights, random = generate(model, tokenizer, config, leaves=True)
    assert torch.equal(ours, stock)
    assert random == stock_random
    # the rows of each pass, counted by hand: those without an end at the last look
    width = stock.size(1) - len(heights)
    ended = (stock[:, width:] == tokenizer.eos_token_id).cumsum(1) > 0
    expected = [len(PROMPTS) * 2]  # the prompts
    for step in range(1, len(heights)):
        looked = step // EVERY * EVERY
        live = int((~ended[:, looked - 1]).sum()) if looked else len(ended)
        expected.append(max(live, 1))
    assert heights == expected
    assert set(stock_heights) == {len(PROMPTS) * 2}
    if fields.get("do_sample", True):
        assert heights[-1] < len(PROMPTS)


def test_a_second_call_starts_with_all_rows(model, tokenizer):
    config = config_of(model, tokenizer)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    torch.manual_seed(0)
    stock = [model.generate(**inputs, generation_config=config) for _ in range(2)]
    torch.manual_seed(0)
    with finished_rows_leave(model, config):
        ours = [model.generate(**inputs, generation_config=config) for _ in range(2)]
    assert all(map(torch.equal, ours, stock))


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": False, "top_k": 50, "num_beams": 2},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"eos_token_id": None},
        {"return_dict_in_generate": True},
    ],
)
def test_it_leaves_alone_what_it_cannot_shrink(model, tokenizer, fields):
    config = config_of(model, tokenizer, max_new_tokens=20, **fields)
    stock, stock_heights, _ = generate(model, tokenizer, config, leaves=False)
    ours, heights, _ = generate(model, tokenizer, config, leaves=True)
    if config.return_dict_in_generate:
        stock, ours = stock.sequences, ours.sequences
    assert torch.equal(ours, stock)
    assert heights == stock_heights


def test_hooks_go_when_generation_raises(model, tokenizer):
    with (
        pytest.raises(RuntimeError, match="full"),
        finished_rows_leave(model, config_of(model, tokenizer)),
    ):
        raise RuntimeError("full")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def rows_of_passes(trainer) -> list[int]:
    heights = []
    trainer.model.get_input_embeddings().register_forward_hook(
        lambda _, args, output: heights.append(len(args[0])) if args[0].size(1) == 1 else None
    )
    return heights


@pytest.mark.parametrize("peft_config", [None, LoraConfig(target_modules=["q_proj"])])
def test_training_sees_the_same_rollouts_and_needs_fewer_rows(make_trainer, peft_config):
    runs = []
    for flag in (False, True):
        trainer = make_trainer(
            ar_alpha=0.3,
            generation_skip_finished=flag,
            peft_config=peft_config,
            max_completion_length=40,
            model_init_kwargs={"dtype": torch.float64},
            max_steps=4,
        )
        heights = rows_of_passes(trainer)
        trainer.train()
        runs.append((heights, trainer))
    (stock_rows, stock), (rows, ours) = runs
    for a, b in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(rows) == len(stock_rows)
    assert sum(rows) < 0.8 * sum(stock_rows)


@pytest.mark.parametrize(
    ("fields", "leaves"),
    [
        ({}, False),
        ({"generation_skip_finished": True}, True),
        ({"lopti_eta": 0.5}, True),
        ({"lopti_eta": 0.5, "generation_skip_finished": False}, False),
    ],
)
def test_it_is_on_by_itself_only_with_a_method(make_trainer, fields, leaves):
    trainer = make_trainer(max_completion_length=40, max_steps=1, **fields)
    heights = rows_of_passes(trainer)
    trainer.train()
    assert (min(heights) < max(heights)) == leaves


def test_stock_trl_generates_the_same_completions(make_trainer):
    seen = []

    def reward(completion_ids, **kwargs):
        seen.append(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    settings = {"max_completion_length": 40, "max_steps": 1, "reward_funcs": reward}
    settings["model_init_kwargs"] = {"dtype": torch.float64}
    make_trainer(GRPOTrainer, **settings).train()
    make_trainer(generation_skip_finished=True, **settings).train()
    theirs, ours = seen
    assert ours == theirs


def test_evaluation_uses_it(model, tokenizer):
    engine = TransformersEngine(model, tokenizer)
    prompts = tokenizer(PROMPTS)["input_ids"]
    heights = []
    layer = model.get_input_embeddings()
    layer.register_forward_hook(lambda _, args, output: heights.append(len(args[0])))
    ours = engine(prompts, Sampling(max_tokens=60, temperature=1.0), [1])
    assert min(heights) < len(PROMPTS) == max(heights)
    # one prompt at a time, greedily, no row can leave
    greedy = Sampling(max_tokens=60)
    assert engine(prompts, greedy, [1]) == [engine([ids], greedy, [1])[0] for ids in prompts]
    assert all(ids.count(tokenizer.eos_token_id) <= 1 for ids in ours)
