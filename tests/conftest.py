"""A random tiny model, its tokenizer and a reward, shared by the trainer tests."""

import gc

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from lopti_trl import LoptiGRPOConfig, LoptiGRPOTrainer
from lopti_trl.config import TRICKS

LETTERS = "abcdefghijklmnopqrstuvwxyz "

torch.set_num_threads(1)  # with more, parallel workers wait on one another, and forks may hang


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage():
    """Every `train` collects garbage: a quarter of a second of looking at imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter; passed to trainers explicitly, since AutoTokenizer would replace it."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def save_random_model(path, tokenizer, initializer_range: float) -> str:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    set_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def model_dir(tokenizer, tmp_path_factory) -> str:
    """Saved random Qwen2 whose sampled tokens spread over all probabilities."""
    return save_random_model(tmp_path_factory.mktemp("model"), tokenizer, initializer_range=0.3)


def letters_reward(completion_ids, **kwargs) -> list[float]:
    """Share of even token ids: spreads over the completions of a random model."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


PROMPTS = ["abc", "hello there", "the quick brown fox", "x", "lorem ipsum", "a b c", "zz", "grpo"]


@pytest.fixture
def make_trainer(model_dir, tokenizer, tmp_path):
    """Build a trainer on CPU: `make_trainer(GRPOTrainer, beta=0.04)`; 8 completions a rollout."""

    def make(
        trainer_class=LoptiGRPOTrainer,
        model=model_dir,
        callbacks=(),
        peft_config=None,
        tricks=False,
        reward_funcs=letters_reward,
        train_dataset=None,
        **args,
    ):
        defaults = {
            "output_dir": str(tmp_path / "out"),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "learning_rate": 1e-2,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 2,
            "max_completion_length": 8,
            "temperature": 0.7,
            "epsilon_high": 0.24,
            "activation_checkpointing": False,
            "seed": 1,
        }
        config_class = GRPOConfig
        if trainer_class is not GRPOTrainer:
            config_class = LoptiGRPOConfig
            # stock micro-batches, unless a test asks for others (test_update.py does)
            defaults |= {f"update_{name}": tricks for name in TRICKS}
        return trainer_class(
            model=model,
            reward_funcs=reward_funcs,
            args=config_class(**{**defaults, **args}),
            train_dataset=train_dataset or Dataset.from_dict({"prompt": PROMPTS * 4}),
            processing_class=tokenizer,
            callbacks=list(callbacks),
            peft_config=peft_config,
        )

    return make


@pytest.fixture
def rollout(make_trainer):
    """A trainer and the first micro-batch of a rollout that it made: `rollout(ar_alpha=0.3)`."""

    def make(**args):
        trainer = make_trainer(**args)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1  # the training loop sets it
        prompts = [{"prompt": p} for p in PROMPTS[:2] for _ in range(4)]
        inputs = trainer._prepare_inputs(prompts)
        return trainer, inputs

    return make
