"""Run a function as every rank of a gloo group, each in a forked child: imports cost more."""

import multiprocessing
import os
import socket
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState


def _child(function, folder: Path, rank: int, world_size: int, port: int, args: tuple) -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # the parent's
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    torch.save(function(world_size, *args), folder / f"rank{rank}.pt")


def run_ranks(function, folder: Path, world_size: int, *args) -> list:
    """What `function(world_size, *args)` returned on each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_child, args=(function, folder, rank, world_size, port, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.exitcode != 0:
            for other in processes:
                other.kill()
    assert [process.exitcode for process in processes] == [0] * world_size
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]
