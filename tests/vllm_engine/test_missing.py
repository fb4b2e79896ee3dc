"""Without vLLM: what `make test` can say."""

import pytest

from lopti_trl import LoptiGRPOConfig, LoptiGRPOTrainer
from vllm_engine.conftest import DEFAULTS


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_missing_vllm_is_reported_before_the_model_loads(mode):
    args = LoptiGRPOConfig(**{**DEFAULTS, "vllm_mode": mode})
    with pytest.raises(ImportError, match=r"vLLM is not installed.*pip install 'lopti-trl\[vllm"):
        LoptiGRPOTrainer(model="no/such/model", reward_funcs=len, args=args)


def test_a_seed_in_generation_kwargs_is_refused():
    with pytest.raises(ValueError, match="every completion of a group the same"):
        LoptiGRPOConfig(**DEFAULTS, generation_kwargs={"seed": 1})
