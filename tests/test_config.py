"""Level 2: every bad value or combination names the value, the rule and the fix."""

import pytest

from lopti_trl import LoptiGRPOConfig


def config(**fields) -> LoptiGRPOConfig:
    defaults = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
    return LoptiGRPOConfig(**{**defaults, **fields})


def test_every_method_is_off_by_default():
    assert not config().uses_token_probs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ar_alpha": -0.1}, r"ar_alpha=-0\.1 is outside \[0, 1\].*Use 0 to turn AR off"),
        ({"ar_alpha": 1.5}, r"ar_alpha=1\.5 is outside \[0, 1\]"),
        ({"ar_alpha": float("nan")}, r"ar_alpha=nan is outside"),
        ({"lopti_eta": 0.0}, r"lopti_eta=0\.0 is outside \(0, 1\).*None to turn Lopti off"),
        ({"lopti_eta": 1.0}, r"lopti_eta=1\.0 is outside \(0, 1\)"),
        ({"lopti_eta": -0.5}, r"lopti_eta=-0\.5 is outside \(0, 1\)"),
        ({"lopti_quantile": 1.0}, r"lopti_quantile=1\.0 is outside \(0, 1\)"),
        ({"lopti_eta": 0.5, "lopti_quantile": 0.5}, r"lopti_eta=0\.5 and.*Keep one"),
        ({"lopti_order": "low"}, r"lopti_order='low' is unknown. Use one of low_first, high_first"),
        ({"lopti_schedule": "x"}, r"lopti_schedule='x' is unknown. Use one of batch, minibatch"),
        ({"prob_band": [0.5, 0.5]}, r"prob_band=\[0\.5, 0\.5\] is not two numbers low < high"),
        ({"prob_band": [0.5, 0.2]}, r"prob_band=\[0\.5, 0\.2\]"),
        ({"prob_band": [-0.1, 0.2]}, r"prob_band=\[-0\.1, 0\.2\]"),
        ({"prob_band": [0.5, 1.2]}, r"prob_band=\[0\.5, 1\.2\]"),
        ({"prob_band": [0.5]}, r"prob_band=\[0\.5\].*use \[0, 0\.25\]"),
        (
            {"lopti_eta": 0.5, "steps_per_generation": 3, "gradient_accumulation_steps": 2},
            r"steps_per_generation=3 is not a multiple of gradient_accumulation_steps=2. Set "
            r"steps_per_generation to 4, or gradient_accumulation_steps to a divisor of 3",
        ),
        (
            {"lopti_quantile": 0.5, "steps_per_generation": 2, "gradient_accumulation_steps": 4},
            r"Set steps_per_generation to 4",
        ),
    ],
)
def test_bad_values_raise_and_name_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_phases_must_be_whole_steps_only_when_lopti_is_on():
    assert config(steps_per_generation=3, gradient_accumulation_steps=2, num_generations=3)


@pytest.mark.parametrize("fields", [{"ar_alpha": 0.3}, {"lopti_eta": 0.5}, {"lopti_quantile": 0.4}])
def test_each_method_says_that_it_needs_token_probabilities(fields):
    assert config(**fields).uses_token_probs
    assert config(prob_band=[0, 1.0]).uses_token_probs
