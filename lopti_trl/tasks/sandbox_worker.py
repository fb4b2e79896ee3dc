"""Where untrusted programs run: `python sandbox_worker.py FD`, started by sandbox.py.

For each program a worker forks two confined processes from its clean state: the tester, which has
the tests and gives the verdict, and the runner, which has the program and answers the tester's
calls with plain values. So no code of the program runs where the verdict is made, and the program
finds no test in its memory, its worker's included.

Confined means: a seccomp filter with a list of allowed system calls, a Landlock ruleset that lets
Python's libraries be read and nothing be written, and resource limits. All three bind root too,
need no privilege and work in containers. Only the standard library is imported before that.
"""

import builtins
import ctypes
import fcntl
import importlib
import itertools
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

# What a Python program that computes asks of the kernel. All else fails: processes and threads
# (clone), programs (execve), sockets, signals, changes to files, files in memory, higher limits.
SYSTEM_CALLS = (  # noqa: SIM905 - a list literal would take 80 lines
    "read readv pread64 write writev close lseek open openat stat lstat fstat newfstatat statx "
    "access faccessat faccessat2 readlink readlinkat getdents64 getcwd dup dup2 dup3 poll ppoll "
    "select pselect6 mmap munmap mprotect mremap brk futex rt_sigaction rt_sigprocmask "
    "rt_sigreturn sigaltstack alarm getitimer setitimer pause clock_gettime clock_getres "
    "clock_nanosleep nanosleep gettimeofday time times getrusage getpid getppid gettid getuid "
    "geteuid getgid getegid getrandom uname sysinfo sched_getaffinity sched_yield restart_syscall "
    "exit exit_group"
).split()
# Of these calls the argument at a place must be one of some values: others send signals, change a
# terminal or, for root, retire pages of the machine's memory.
RESTRICTED_CALLS = {
    "fcntl": (
        1,
        (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL),
    ),
    "ioctl": (1, (0x5401, 0x5451)),  # TCGETS, FIOCLEX
    "madvise": (2, (mmap.MADV_DONTNEED, mmap.MADV_FREE, mmap.MADV_HUGEPAGE)),
}
READABLE_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
READABLE_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")
MAX_OPEN_FILES = 32
MAX_MESSAGE = 8 << 20  # bytes of one call or answer
MAX_ITEMS = 100_000  # taken from an iterator that a program returns
PRELOADED = (  # noqa: SIM905 - what programs often import
    "bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib "
    "heapq itertools math operator random re statistics string typing"
).split()
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


# Confinement


def make_filter():
    import pyseccomp

    calls = pyseccomp.SyscallFilter(pyseccomp.ERRNO(1))  # EPERM, for all that is not listed
    for name in SYSTEM_CALLS:
        calls.add_rule(pyseccomp.ALLOW, name)
    for name, (place, values) in RESTRICTED_CALLS.items():
        for value in values:
            calls.add_rule(pyseccomp.ALLOW, name, pyseccomp.Arg(place, pyseccomp.EQ, value))
    return calls


def make_ruleset():
    from landlock import FSAccess, Ruleset

    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ruleset = Ruleset()
    for folder in {f"{sys.base_prefix}/lib", *folders, *READABLE_FOLDERS}:
        if os.path.isdir(folder):
            ruleset.allow(folder, rules=FSAccess.READ_FILE | FSAccess.READ_DIR)
    ruleset.allow(*filter(os.path.exists, READABLE_FILES), rules=FSAccess.READ_FILE)
    ruleset.allow(os.devnull, rules=FSAccess.READ_FILE | FSAccess.WRITE_FILE)
    return ruleset


def keep_only(*descriptors: int) -> None:
    """Make these 3, 4, ...; 0 to 2 are /dev/null; close all others."""
    null = os.open(os.devnull, os.O_RDWR)
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (null, null, null, *descriptors)]
    for target, descriptor in enumerate(kept):
        os.dup2(descriptor, target)
    os.closerange(len(kept), os.sysconf("SC_OPEN_MAX"))


class Cell:
    """What confines a process: made once in the worker, applied in each child.

    The rules on files bind the worker as well, from which its children have them.
    """

    def __init__(self):
        self.calls, self.libc, self.worker = make_filter(), ctypes.CDLL(None), os.getpid()
        make_ruleset().apply()

    def confine(self, limits: dict, *descriptors: int) -> None:
        """From here on, for good, this process can compute and use these descriptors."""
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self.libc.prctl(PR_SET_DUMPABLE, 0)  # no core dump, not even through a pipe
        if os.getppid() != self.worker:  # it ended before the first of these lines
            os._exit(1)
        keep_only(*descriptors)
        for kind, limit in (
            (resource.RLIMIT_CPU, limits["cpu_seconds"]),
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, 0),  # root ignores it, but not the filter
        ):
            resource.setrlimit(kind, (limit, limit))
        self.calls.load()


# Values that cross between the two processes: JSON, with a tag for what JSON has not


def encode(value):
    """Raises TypeError for what is not a plain value."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [encode(item) for item in value]
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case set() | frozenset() | KeysView() | ItemsView():
            return {"set": [encode(item) for item in value]}
        case dict():
            return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
        case range():
            return {"range": [value.start, value.stop, value.step]}
        case complex():
            return {"complex": [value.real, value.imag]}
        case bytes() | bytearray():
            return {"bytes": value.decode("latin-1")}
        case Fraction() | Decimal():
            return {type(value).__name__: str(value)}
        case ValuesView() | Iterator():
            items = itertools.islice(iter(value), MAX_ITEMS)
            return {"iterator": [encode(item) for item in items]}
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist())
    raise TypeError(f"{type(value).__name__} cannot cross between program and tests")


DECODERS: dict[str, Callable] = {
    "tuple": tuple,
    "set": frozenset,  # equal to a set, and may be in one
    "dict": dict,
    "range": lambda bounds: range(*bounds),
    "complex": lambda parts: complex(*parts),
    "bytes": lambda text: text.encode("latin-1"),
    "Fraction": Fraction,
    "Decimal": Decimal,
    "iterator": iter,
}


def decode(data):
    """Values of the types above and no others, whatever the other side has sent."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if isinstance(data, dict):
        ((kind, content),) = data.items()
        return DECODERS[kind](decode(content))
    return data


class Channel:
    """Messages in both directions, a line of JSON each."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.reader = open(descriptor, "rb", closefd=False)  # noqa: SIM115 - open to the end

    def send(self, message) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.descriptor, data) :]

    def receive(self):
        line = self.reader.readline(MAX_MESSAGE)
        if not line.endswith(b"\n"):
            raise EOFError("the other side has ended, or says too much")
        return json.loads(line)


# Runner


def run_program(channel: Channel) -> None:
    """Execute the program that comes first, then answer calls: name, arguments, keywords."""
    module = sys.modules["program"] = types.ModuleType("program")

    def execute(program: str) -> None:
        exec(compile(program, "program.py", "exec"), module.__dict__)

    call, arguments, keywords = execute, [channel.receive()], {}
    while True:
        try:
            answer = {"value": encode(call(*arguments, **keywords))}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": str(error)[:200]}
        channel.send(answer)
        name, arguments, keywords = decode(channel.receive())
        call = getattr(module, name, None)


# Tester


class Died(BaseException):
    """The runner is gone or talks nonsense. Not an Exception: no test may take it for one."""


class Solution:
    """The program as the tests see it."""

    def __init__(self, channel: Channel, program: str):
        self.channel = channel
        self.ask(program)

    def ask(self, message):
        try:
            self.channel.send(message)
            answer = self.channel.receive()
            name = answer.get("error")
            value = None if name else decode(answer["value"])
        except Exception as error:
            raise Died from error
        if name:
            raise self.exception(name)(str(answer.get("message")))
        return value

    @staticmethod
    def exception(name: str) -> type[Exception]:
        kind = getattr(builtins, name, None)
        # StopIteration would end a test's loop as if it were through
        if isinstance(kind, type) and issubclass(kind, ArithmeticError | LookupError | ValueError):
            return kind
        known = (AssertionError, AttributeError, NameError, NotImplementedError, TypeError)
        return kind if kind in known else RuntimeError

    def function(self, name: str) -> Callable:
        return lambda *arguments, **keywords: self.ask(
            [name, encode(list(arguments)), encode(keywords)]
        )


def run_tests(trainer: Channel, runner: Channel) -> None:
    """Tell the trainer "passed" or "failed"; nothing if the runner does not last."""
    job, verdict = trainer.receive(), "failed"
    with suppress(Exception):
        namespace = {"__name__": "tests"}
        exec(compile(job["setup"], "setup.py", "exec"), namespace)
        solution = Solution(runner, job["program"])
        namespace.update({name: solution.function(name) for name in job["names"]})
        exec(compile(job["tests"], "tests.py", "exec"), namespace)
        verdict = "passed"
    trainer.send(verdict)


# Worker


def fork(cell: Cell, limits: dict, work: Callable, *descriptors: int) -> int:
    """Start `work` in a confined process of its own, with channels over the descriptors."""
    pid = os.fork()
    if pid:
        return pid
    with suppress(BaseException):
        cell.confine(limits, *descriptors)
        sys.set_int_max_str_digits(0)
        work(*(Channel(3 + index) for index in range(len(descriptors))))
    os._exit(0)


def judge(cell: Cell, limits: dict, trainer: int, control: socket.socket) -> str:
    """Let tester and runner talk, and the tester with the trainer. Both are gone afterwards."""
    tests_end, program_end = socket.socketpair()
    with tests_end, program_end:
        runner = fork(cell, limits, run_program, program_end.fileno())
        tester = fork(cell, limits, run_tests, trainer, tests_end.fileno())
    os.close(trainer)
    end = os.pidfd_open(tester)
    # `control` has something to read only if the trainer has ended
    ready, _, _ = select.select([end, control], [], [], limits["wall_seconds"])
    os.close(end)
    for pid in (runner, tester):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return "done" if end in ready else "late"


FORBIDDEN = {  # what a confined process fails to do, and what harms nothing where it does not fail
    "start a process": lambda: os.fork() or os._exit(0),
    "open a socket": socket.socket,
    "signal its parent": lambda: os.kill(os.getppid(), 0),
    "read a file": lambda: os.open("/proc/self/environ", os.O_RDONLY),
    "write a file": lambda: os.open("/dev/zero", os.O_WRONLY),
    "run a program": lambda: os.execv(sys.executable, [sys.executable, "-c", ""]),
}


def report_forbidden(channel: Channel) -> None:
    possible = []
    for name, attempt in FORBIDDEN.items():
        with suppress(PermissionError):
            attempt()
            possible.append(name)
    channel.send(possible)


def check(cell: Cell) -> str:
    """ "ready", or what is wrong with the confinement here."""
    ours, theirs = socket.socketpair()
    with theirs:
        limits = {"cpu_seconds": 5, "memory_bytes": 1 << 30}
        pid = fork(cell, limits, report_forbidden, theirs.fileno())
    with ours, ours.makefile("rb") as reader:
        report = reader.readline()
    os.waitpid(pid, 0)
    if not report:
        return "a process cannot be confined: Landlock or seccomp is refused"
    possible = json.loads(report)
    return f"a confined process can still {', '.join(possible)}" if possible else "ready"


def main(control: socket.socket) -> None:
    """Say "ready" or what is wrong; then, for each descriptor with limits, judge one program."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel takes these, not the trainer
    try:
        cell = Cell()
        state = check(cell)
    except Exception as error:  # of two libraries, which do not say what they raise
        state = f"{type(error).__name__}: {error}"
    control.sendall(state.encode())
    if state != "ready":
        return
    for name in PRELOADED:
        importlib.import_module(name)
    while True:
        limits, descriptors, *_ = socket.recv_fds(control, 1024, 1)
        if not limits:
            return
        with suppress(BrokenPipeError):
            control.sendall(judge(cell, json.loads(limits), *descriptors, control).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
