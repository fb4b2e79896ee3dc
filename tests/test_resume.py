"""Level 4: a run that is killed and resumed ends with the same bits; checkpoints are never lost."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from trl import GRPOTrainer

from lopti_trl import checkpoint
from lopti_trl.checkpoint import find_last_checkpoint, what_is_broken
from lopti_trl.phases import phase_schedule

METHODS = {
    "grpo": {},
    "grpo_num_iterations": {"num_iterations": 2, "beta": 0.04},
    "lopti_batch": {"lopti_eta": 0.5, "ar_alpha": 0.3},
    "lopti_minibatch": {"lopti_quantile": 0.5, "lopti_schedule": "minibatch"},
    "pi_old_off_the_update": {
        "lopti_eta": 0.5,
        "ar_alpha": 0.3,
        "diagnostics": False,
        "tricks": None,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 4,
    },
    "accumulation": {
        "lopti_eta": 0.5,
        "prob_band": [0.0, 0.9],
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
}
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
# 32 prompts, 2 a rollout batch: the runs below go through the data more than once
STEPS = 12


def final_state(trainer) -> dict[str, torch.Tensor]:
    optimizer = trainer.optimizer.state_dict()["state"]
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()} | {
        f"{index}/{name}": value.clone()
        for index, state in optimizer.items()
        for name, value in state.items()
    }


def assert_equal_states(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def logged(trainer) -> list[dict]:
    clocks = ("step_time", "train_")
    return [
        {k: v for k, v in row.items() if not k.startswith(clocks)}
        for row in trainer.state.log_history
        if "loss" in row
    ]


FAST = ("grpo_num_iterations", "lopti_batch", "pi_old_off_the_update")


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * (m not in FAST)) for m in METHODS]
)
def test_resuming_from_any_step_ends_with_the_same_bits(make_trainer, method):
    fields = {**METHODS[method], **EVERY_STEP, "max_steps": STEPS}
    whole = make_trainer(**fields)
    whole.train_dataset = whole.train_dataset.select(range(8))  # four rollout batches an epoch
    whole.train()
    expected, expected_log = final_state(whole), logged(whole)
    for step in range(1, STEPS):
        resumed = make_trainer(**{**fields, "save_strategy": "no"})
        resumed.train_dataset = whole.train_dataset
        torch.manual_seed(step)  # whatever state the new process starts in
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{step}")
        assert_equal_states(final_state(resumed), expected)
        assert logged(resumed) == expected_log


def test_plain_trl_drifts_when_it_resumes_inside_a_rollout_batch(make_trainer):
    """What the test above would find without our state: it is able to fail."""
    fields = {**EVERY_STEP, "max_steps": 4}
    whole = make_trainer(GRPOTrainer, **fields)
    whole.train()
    resumed = make_trainer(GRPOTrainer, **fields)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-1")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-3


def test_metrics_that_no_log_has_shown_survive(make_trainer):
    fields = {"lopti_eta": 0.5, "save_strategy": "steps", "save_steps": 3, "max_steps": 8}
    whole = make_trainer(**fields, logging_steps=4)
    whole.train()
    resumed = make_trainer(**fields, logging_steps=4)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    ours, theirs = logged(resumed)[0], logged(whole)[0]
    assert ours["lopti/low/loss"] == theirs["lopti/low/loss"]
    assert ours["reward"] == theirs["reward"]


def test_a_checkpoint_of_plain_trl_resumes_with_a_warning_where_it_is_not_exact(
    make_trainer, caplog
):
    plain = make_trainer(GRPOTrainer, **EVERY_STEP, max_steps=4)
    plain.train()
    expected = final_state(plain)
    for step, warned in ((2, False), (3, True)):
        caplog.clear()
        resumed = make_trainer(logging_steps=1, max_steps=4)
        resumed.train(resume_from_checkpoint=f"{plain.args.output_dir}/checkpoint-{step}")
        assert resumed.state.global_step == 4
        assert ("saved by plain TRL inside a rollout batch" in caplog.text) is warned
        if not warned:
            assert_equal_states(final_state(resumed), expected)


@pytest.mark.parametrize(
    "change", [{"lopti_eta": 0.4}, {"lopti_schedule": "minibatch"}, {"lopti_eta": None}], ids=str
)
def test_changed_settings_are_refused_inside_a_rollout_batch_and_reported_between(
    make_trainer, caplog, change
):
    fields = {"lopti_eta": 0.5, **EVERY_STEP, "max_steps": 6}
    whole = make_trainer(**fields)
    whole.train()
    folder = whole.args.output_dir
    changed = make_trainer(**{**fields, **change})
    with pytest.raises(ValueError, match=r"cannot go on with changed settings \(.*lopti_"):
        changed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    changed = make_trainer(**{**fields, **change})
    changed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert "Resuming with changed settings: lopti_" in caplog.text
    assert changed.state.global_step == 6


@pytest.mark.parametrize("moment", ["model", "optimizer", "rollout", "manifest"])
def test_a_save_that_fails_keeps_what_was_there_and_says_so(make_trainer, monkeypatch, moment):
    trainer = make_trainer(lopti_eta=0.5, **EVERY_STEP, max_steps=3)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    trainer.train()
    folder = Path(trainer.args.output_dir)
    before = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    targets = {
        "model": (trainer, "save_model"),
        "optimizer": (trainer, "_save_optimizer_and_scheduler"),
        "rollout": (checkpoint, "save_rollout"),
        "manifest": (checkpoint, "write_manifest"),
    }
    monkeypatch.setattr(*targets[moment], full_disk)
    trainer.state.global_step += 1
    with pytest.raises(OSError, match="No space left") as raised:
        trainer._save_checkpoint(trainer.model, trial=None)
    assert "GB free. The checkpoints in it are whole" in raised.value.__notes__[0]
    after = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert after == before
    assert find_last_checkpoint(folder) == str(folder / "checkpoint-3")


def test_auto_resume_skips_broken_checkpoints_and_says_why(make_trainer, caplog):
    trainer = make_trainer(**EVERY_STEP, max_steps=5)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    assert find_last_checkpoint(folder) == str(folder / "checkpoint-5")
    (folder / "checkpoint-5" / "optimizer.pt").unlink()
    with (folder / "checkpoint-4" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    (folder / "checkpoint-3" / "manifest.json").write_text("{")
    (folder / "checkpoint-2" / "manifest.json").unlink()  # as if by plain TRL
    assert find_last_checkpoint(folder) == str(folder / "checkpoint-2")
    assert "checkpoint-5: optimizer.pt is missing" in caplog.text
    assert "checkpoint-4: model.safetensors has 100 bytes instead of" in caplog.text
    assert "checkpoint-3: manifest.json is not readable" in caplog.text
    (folder / "checkpoint-2" / "trainer_state.json").unlink()
    shutil.rmtree(folder / "checkpoint-1")
    assert find_last_checkpoint(folder) is None


def test_old_checkpoints_go_only_when_the_new_one_is_whole(make_trainer):
    trainer = make_trainer(**EVERY_STEP, save_total_limit=2, max_steps=5)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    names = sorted(path.name for path in folder.iterdir() if path.name.startswith("checkpoint"))
    assert names == ["checkpoint-4", "checkpoint-5"]
    assert all(what_is_broken(folder / name) is None for name in names)
    manifest = json.loads((folder / "checkpoint-5" / "manifest.json").read_text())
    assert {"model.safetensors", "optimizer.pt", "rollout_0.pt", "rng_state.pth"} <= manifest.keys()


def test_the_phase_of_a_resumed_step_is_the_one_that_was_due(make_trainer):
    fields = {"lopti_eta": 0.5, **EVERY_STEP, "max_steps": 4}
    make_trainer(**fields).train()
    resumed = make_trainer(**fields)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    row = next(row for row in resumed.state.log_history if row["step"] == 3)
    assert phase_schedule(2, 2, 1).phase == "high"
    assert "lopti/high/loss" in row
