"""Trainers whose rollouts a vLLM engine makes, colocated on CPU, with the package's tiny model."""

import functools
import importlib.util

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from lopti_trl import LoptiGRPOConfig, LoptiGRPOTrainer
from lopti_trl.train import model_path
from lopti_trl.update import concatenate

HAS_VLLM = importlib.util.find_spec("vllm") is not None
NEED_VLLM = [
    "test_dynamic_sampling.py",
    "test_evaluation.py",
    "test_rollout.py",
    "test_seed.py",
    "test_server.py",
]
collect_ignore = ["test_missing.py"] if HAS_VLLM else NEED_VLLM

MODEL = model_path("kk-tiny")
PROMPTS = [
    "Zoey is a knave",
    "a very special island",
    "Luke",
    "<think>",
    "1 + 1",
    "or",
    "Zoey",
    "x",
]
DEFAULTS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_completion_length": 12,
    "temperature": 0.9,
    "activation_checkpointing": False,
    "seed": 1,
    "use_vllm": True,
    "vllm_max_model_length": 64,
    "ar_alpha": 0.3,
    "lopti_eta": 0.5,
}


def noise_reward(completion_ids, **kwargs) -> list[float]:
    """Differs between completions and teaches nothing, so that the policy moves but stays broad."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


class RecordingTrainer(LoptiGRPOTrainer):
    """Keeps every rollout batch as buffered, and the parameters that it was sampled with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rollouts = []
        self.parameters = []

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if self._step % self._steps_per_rollout == 0:
            self.rollouts.append(concatenate(self._buffered_inputs))
            self.parameters.append(
                {name: p.detach().clone() for name, p in self.model.named_parameters()}
            )
        return inputs

    def score(self, rollout: int, prompt_of: list[int] | None = None) -> torch.Tensor:  # (N,)
        """Log-probs of a rollout batch's tokens by the parameters that should have sampled them.

        By plain transformers, a row at a time, without padding. `prompt_of` gives each completion
        the prompt of another row.
        """
        rows, temperature = self.rollouts[rollout], self.args.temperature
        logps = []
        for row in range(len(rows["prompt_ids"])):
            source = prompt_of[row] if prompt_of else row
            prompt = rows["prompt_ids"][source][rows["prompt_mask"][source].bool()]
            completion = rows["completion_ids"][row][rows["completion_mask"][row].bool()]
            ids = torch.cat([prompt, completion])[None]
            with torch.no_grad():
                logits = torch.func.functional_call(
                    self.accelerator.unwrap_model(self.model),
                    self.parameters[rollout],
                    kwargs={"input_ids": ids},
                ).logits[0]
            log_probs = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
            logps.append(log_probs.gather(1, completion[:, None])[:, 0])
        return torch.cat(logps)

    def kept(self, rollout: int, name: str) -> torch.Tensor:  # (N,)
        """A (B, T) entry of a rollout batch on its valid tokens."""
        rows = self.rollouts[rollout]
        return rows[name][rows["completion_mask"].bool()]

    def completions(self) -> list[list[list[int]]]:
        """Token ids of each rollout batch, in the order of the buffer."""
        return [
            [
                ids[mask.bool()].tolist()
                for ids, mask in zip(rows["completion_ids"], rows["completion_mask"], strict=True)
            ]
            for rows in self.rollouts
        ]


def build(trainer_class, output_dir, peft_config=None, **args):
    return trainer_class(
        model=MODEL,
        reward_funcs=noise_reward,
        args=LoptiGRPOConfig(**{**DEFAULTS, "output_dir": str(output_dir), **args}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=AutoTokenizer.from_pretrained(MODEL, padding_side="left"),
        peft_config=peft_config,
    )


def make_exact(setattr=setattr, **engine):
    """Let TRL's next colocated engine on CPU take new weights, and compute as the trainer does."""
    import vllm
    import vllm._custom_ops
    import vllm.model_executor.layers.utils
    from trl.generation import vllm_generation

    # once its weights are packed for oneDNN, a CPU engine cannot take new ones
    setattr(vllm._custom_ops, "_supports_onednn", False)
    setattr(vllm.model_executor.layers.utils, "check_cpu_sgl_kernel", lambda *shape: False)
    # vLLM makes a float32 model bfloat16 unless told otherwise, and TRL has no option for it
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 32 * 2**20,  # engines outlive their trainers
    }
    setattr(vllm_generation, "LLM", functools.partial(vllm.LLM, **{**options, **engine}))


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    """Build a trainer with a colocated engine: `make_trainer(seed=2)`."""

    def make(trainer_class=RecordingTrainer, engine=None, **args):
        make_exact(monkeypatch.setattr, **(engine or {}))
        return build(trainer_class, **{"output_dir": tmp_path / "out", **args})

    return make


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "vllm_engine":
            item.add_marker(
                # TRL 1.16 reads the old name of `is_activation_checkpointing`
                pytest.mark.filterwarnings(
                    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
                )
            )
