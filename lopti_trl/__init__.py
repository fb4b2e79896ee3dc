"""Token-probability-aware GRPO on Hugging Face TRL: Advantage Reweighting and Lopti."""

import importlib

__version__ = "0.1.0"

_EXPORTS = {"LoptiGRPOConfig": "config", "LoptiGRPOTrainer": "trainer"}

__all__ = ["LoptiGRPOConfig", "LoptiGRPOTrainer"]


def __getattr__(name: str):
    # lazy, so that lopti_trl.weights loads torch and nothing heavier
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"lopti_trl.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'lopti_trl' has no attribute {name!r}")
