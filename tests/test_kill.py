"""Level 4: kill -9 at any moment, resume from the newest whole checkpoint, end with the same bits.

Every run is a forked child (imports cost more than the run), which kills itself at a chosen spot.
"""

import multiprocessing
import os
import random
import signal
import socket
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from lopti_trl import LoptiGRPOTrainer, checkpoint
from lopti_trl.checkpoint import find_last_checkpoint

STEPS = 12
FIELDS = {
    "lopti_eta": 0.5,
    "ar_alpha": 0.3,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "tricks": None,
}
# (object, method): killed before or after it ran for the n-th time
SPOTS = {
    "generation": (LoptiGRPOTrainer, "_generate_single_turn"),
    "scoring": (LoptiGRPOTrainer, "_calculate_rewards"),
    "loss": (LoptiGRPOTrainer, "_compute_loss"),
    "optimizer": (torch.optim.AdamW, "step"),
    "model": (LoptiGRPOTrainer, "save_model"),
    "random state": (LoptiGRPOTrainer, "_save_rng_state"),
    "manifest": (checkpoint, "write_manifest"),
    "name": (Path, "rename"),
    "rotation": (checkpoint, "rotate_checkpoints"),
}
RANK_ZERO_SPOTS = ("manifest", "name", "rotation")


def kill_at(spot: str, call: int, after: bool) -> None:
    """Replace a function by one that kills its process at the given call."""
    holder, name = SPOTS[spot]
    original = getattr(holder, name)
    calls = 0

    def deadly(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(holder, name, deadly)


def child(make_trainer, folder: Path, death: tuple | None, rank: int | None, port: int) -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # the parent's
    if rank is not None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    if death:
        kill_at(*death)
    size = {} if rank is None else {"per_device_train_batch_size": 2}
    trainer = make_trainer(output_dir=str(folder / "run"), **FIELDS, **size)
    assert trainer.accelerator.num_processes == (1 if rank is None else 2)
    trainer.train(resume_from_checkpoint=find_last_checkpoint(folder / "run"))
    if rank in (None, 0):
        torch.save(trainer.model.state_dict(), folder / "final.pt")


def run(make_trainer, folder: Path, world_size: int, death: tuple | None = None) -> list[int]:
    """Exit codes of the processes of one run. `death` strikes one of them, first in the list."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [None] if world_size == 1 else [1, 0]
    if death and death[0] in RANK_ZERO_SPOTS:
        ranks.reverse()
    processes = []
    for rank in ranks:
        mortal = death if rank == ranks[0] else None
        processes.append(
            context.Process(target=child, args=(make_trainer, folder, mortal, rank, port))
        )
        processes[-1].start()
    processes[0].join(timeout=120)
    if processes[0].exitcode != 0:  # as a launcher does when a process is gone
        for process in processes:
            process.kill()
    for process in processes:
        process.join(timeout=60)
    return [process.exitcode for process in processes]


def moments(count: int) -> list[tuple]:
    """Random (spot, call, before or after it); every spot at least twice."""
    rng = random.Random(0)
    per_rollout = ("generation", "scoring")
    spots = list(SPOTS) * (count // len(SPOTS)) + rng.sample(list(SPOTS), count % len(SPOTS))
    return [
        (spot, rng.randint(1, STEPS // 4 if spot in per_rollout else STEPS), rng.random() < 0.5)
        for spot in spots
    ]


@pytest.fixture(scope="module")
def uninterrupted():
    """Final weights by world size, filled by the first test that needs them."""
    return {}


def check(make_trainer, tmp_path, uninterrupted: dict, world_size: int, death: tuple) -> None:
    if world_size not in uninterrupted:
        (tmp_path / "whole").mkdir()
        assert set(run(make_trainer, tmp_path / "whole", world_size)) == {0}
        uninterrupted[world_size] = torch.load(tmp_path / "whole" / "final.pt", weights_only=True)
    assert run(make_trainer, tmp_path, world_size, death)[0] == -signal.SIGKILL
    assert not (tmp_path / "final.pt").exists()
    assert set(run(make_trainer, tmp_path, world_size)) == {0}
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    for name, expected in uninterrupted[world_size].items():
        assert torch.equal(final[name], expected), name
    left = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert left == [f"checkpoint-{STEPS - 1}", f"checkpoint-{STEPS}"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("death", moments(20), ids=str)
def test_a_killed_run_ends_with_the_same_bits(make_trainer, tmp_path, uninterrupted, death):
    check(make_trainer, tmp_path, uninterrupted, 1, death)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("death", moments(20), ids=str)
def test_a_killed_rank_of_two_ends_with_the_same_bits(make_trainer, tmp_path, uninterrupted, death):
    check(make_trainer, tmp_path, uninterrupted, 2, death)
