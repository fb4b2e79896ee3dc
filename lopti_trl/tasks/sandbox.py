"""Judge untrusted Python programs by their tests, in confined processes.

What a program can and cannot do is said in docs/tasks.md and enforced in sandbox_worker.py.
"""

import atexit
import importlib.util
import json
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

Verdict = Literal["passed", "failed", "died", "late"]

LIBRARIES = ("landlock", "pyseccomp")
MAX_WORKERS = 16
ENVIRONMENT = {  # all of it: a program finds no token here
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same verdict every time
    "OMP_NUM_THREADS": "1",  # numpy could not start threads
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxUnavailable(OSError):
    """Programs cannot be confined on this machine, so none is run."""


class Limits(NamedTuple):
    """Of a program, and of its tests apart."""

    cpu_seconds: int = 3
    wall_seconds: float = 6.0  # for both together
    memory_bytes: int = 1 << 30  # of address space


LIMITS = Limits()


class Job(NamedTuple):
    program: str  # untrusted
    setup: str  # executed before the tests, in their process
    tests: str  # pass if they end without an exception
    names: tuple[str, ...]  # functions of the program that the tests call


class WorkerLost(Exception):
    """A worker has ended, which no program can bring about, but a lack of memory can."""


class Worker:
    """A process that judges one program at a time; see sandbox_worker.py."""

    def __init__(self):
        self.control, theirs = socket.socketpair()
        script = str(Path(__file__).with_name("sandbox_worker.py"))
        with theirs:
            self.process = subprocess.Popen(
                # -P: its folder has a code.py and a math.py; -B: it shall write nothing
                [sys.executable, "-P", "-B", script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the trainer
            )

    def wait_until_ready(self) -> None:
        state = self.control.recv(4096).decode()
        if state != "ready":
            self.close()
            raise SandboxUnavailable(
                f"untrusted programs cannot be confined here, so none is run: "
                f"{state or 'the sandbox worker did not start'}. It takes Linux 5.13 or newer with "
                "Landlock and seccomp (both need no root; old container runtimes block Landlock) "
                "and libseccomp. Train the code task on such a machine, or another task here."
            )

    def judge(self, job: Job, limits: Limits) -> Verdict:
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rb") as answers:
            try:
                with theirs:
                    request = json.dumps(limits._asdict()).encode()
                    socket.send_fds(self.control, [request], [theirs.fileno()])
                answer = b""
                with suppress(ConnectionError):  # the tester was ended before it had read the job
                    ours.sendall(json.dumps(job._asdict()).encode() + b"\n")
                    answer = answers.readline(100)
                state = self.control.recv(16)
            except OSError as error:
                raise WorkerLost from error
        if not state:
            raise WorkerLost
        if not answer:
            return "late" if state == b"late" else "died"
        return "passed" if answer == b'"passed"\n' else "failed"

    def close(self) -> None:
        self.control.close()
        self.process.kill()  # the kernel ends its children with it
        self.process.wait()


class Sandbox:
    """Workers that judge programs side by side. Raises SandboxUnavailable."""

    def __init__(self, count: int | None = None):
        missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
        if missing:
            raise ImportError(
                f"the sandbox needs {' and '.join(missing)}. Run: pip install 'lopti-trl[code]'."
            )
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable(
                f"the sandbox needs Linux, and this is {sys.platform}: train the code task there."
            )
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share = len(os.sched_getaffinity(0)) // ranks
        self.workers = [Worker() for _ in range(count or max(1, min(MAX_WORKERS, share)))]
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            worker.wait_until_ready()
            self.idle.put(worker)

    def judge(self, jobs: Sequence[Job], limits: Limits = LIMITS) -> list[Verdict]:
        """Verdicts in order, within wall_seconds * len(jobs) / number of workers."""
        with ThreadPoolExecutor(len(self.workers)) as threads:
            return list(threads.map(lambda job: self._judge(job, limits), jobs))

    def _judge(self, job: Job, limits: Limits) -> Verdict:
        worker = self.idle.get()
        try:
            for _ in range(2):
                try:
                    return worker.judge(job, limits)
                except WorkerLost:
                    worker.close()
                    position = self.workers.index(worker)
                    worker = self.workers[position] = Worker()
                    worker.wait_until_ready()
            return "died"
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


_sandboxes: dict[int, Sandbox] = {}  # by process: a forked one must not talk to our workers


def judge(jobs: Sequence[Job], limits: Limits = LIMITS) -> list[Verdict]:
    """Verdicts in order, from workers that stay for the next call. Equal jobs are run once."""
    if os.getpid() not in _sandboxes:
        _sandboxes[os.getpid()] = Sandbox()
    distinct = list(dict.fromkeys(jobs))
    verdicts = dict(zip(distinct, _sandboxes[os.getpid()].judge(distinct, limits), strict=True))
    return [verdicts[job] for job in jobs]


@atexit.register
def close() -> None:
    """End the workers, if there are any; the next call starts others."""
    sandbox = _sandboxes.pop(os.getpid(), None)
    if sandbox:
        sandbox.close()
