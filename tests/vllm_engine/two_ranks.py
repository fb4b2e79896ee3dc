"""One of two ranks: `torchrun ... two_ranks.py colocate 1 FOLDER`, or `server URL FOLDER`."""

import json
import os
import sys
from pathlib import Path

from vllm_engine.conftest import RecordingTrainer, build, make_exact
from vllm_engine.fake_server import SERVED, skip_nccl

FIELDS = {"max_steps": 12, "per_device_train_batch_size": 2}


def colocate(folder: Path, tensor_parallel: str) -> str:
    """What each rank sampled, of the one prompt that both have."""
    make_exact()
    trainer = build(
        RecordingTrainer,
        folder / "out",
        num_generations=8,
        temperature=1.5,
        learning_rate=1e-3,
        vllm_tensor_parallel_size=int(tensor_parallel),
        **FIELDS,
    )
    trainer.train()
    pairs = [
        (trainer.kept(i, "sampling_per_token_logps"), trainer.score(i))
        for i in range(len(trainer.rollouts))
    ]
    differences = [(said - scored).abs().max().item() for said, scored in pairs]
    return json.dumps({"completions": trainer.completions(), "differences": differences})


def server(folder: Path, url: str) -> str:
    """The error of a run whose server dies."""
    skip_nccl()
    trainer = build(
        RecordingTrainer,
        folder / "out",
        vllm_server_base_url=url,
        **SERVED,
        **FIELDS,
    )
    try:
        trainer.train()
    except ConnectionError as error:
        return str(error)
    return "no error"


def main(mode: str, argument: str, folder: Path):
    text = {"colocate": colocate, "server": server}[mode](folder, argument)
    rank, num_ranks = (os.environ[name] for name in ("RANK", "WORLD_SIZE"))
    (folder / f"rank{rank}of{num_ranks}.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
