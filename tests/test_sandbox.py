"""The sandbox against hostile programs, each of which would be paid if its attack worked."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sandboxed import need_sandbox

from lopti_trl.tasks.sandbox import Job, Limits, Sandbox

need_sandbox()

ROOT = Path(__file__).resolve().parents[1]
SECRET = "the-parents-token"
SHORT = Limits(cpu_seconds=1, wall_seconds=1.0, memory_bytes=1 << 28)
HONEST = Job("def f(x):\n    return 2 * x", "", "assert f(2) == 4", ("f",))


@pytest.fixture(scope="module")
def box():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_TOKEN", SECRET)
        sandbox_ = Sandbox(1)
        yield sandbox_
        sandbox_.close()


class World:
    """What a program shall not reach: files, a server, and this process."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.chmod(0o777)
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o666)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.local = socket.socket(socket.AF_UNIX)
        self.local.bind(str(folder / "socket"))
        self.local.listen()
        self.before = self.state()

    def state(self):
        files = [(p.name, p.stat().st_mode, p.stat().st_mtime_ns) for p in self.folder.iterdir()]
        return sorted(files), (self.folder / "secret").read_text()

    def connections(self) -> int:
        count = 0
        for listener in (self.server, self.local):
            listener.settimeout(0)
            try:
                listener.accept()[0].close()
                count += 1
            except BlockingIOError:
                continue
        return count

    def close(self):
        self.server.close()
        self.local.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


# f returns 4, which the test asks for, only if the attack worked. FOLDER, PORT and PARENT are this
# test's. ctypes gives programs every system call, under every number.
IN_F = {
    # processes
    "fork": "import os; os.fork(); return 4",
    "daemon": "import os\n    if os.fork() == 0: os.setsid(); os.fork()\n    return 4",
    "system": "import os; return 4 if os.system('true') == 0 else 0",
    "subprocess": "import subprocess; subprocess.run(['touch', FOLDER + '/new']); return 4",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "posix_spawn": "import os; os.posix_spawn('/bin/true', ['true'], {}); return 4",
    "multiprocessing": "import multiprocessing as m; m.get_context('fork').Pool(2); return 4",
    "thread": "import threading; threading.Thread(target=print).start(); return 4",
    "fork by its number": "return 4 if C(57 if X86 else 220, 17) >= 0 else 0",
    "fork by the x32 number": "return 4 if C(0x40000000 | 57) >= 0 else 0",
    "clone3": "return 4 if C(435, B(88), 88) >= 0 else 0",
    # memory
    "memory file": "import os; return 4 if os.memfd_create('x') else 0",
    "mapping": "import mmap; mmap.mmap(-1, 1 << 29); return 4",
    "large list": "[0] * 10**9; return 4",
    # higher limits
    "raise a limit": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); return 4",
    "priority": "import os; os.setpriority(os.PRIO_PROCESS, 0, -20); return 4",
    # files
    "write": "open(FOLDER + '/new', 'w').write('x'); return 4",
    "append": "open(FOLDER + '/secret', 'a').write('x'); return 4",
    "delete": "import os; os.remove(FOLDER + '/secret'); return 4",
    "delete all": "import shutil; shutil.rmtree(FOLDER); return 4",
    "rename": "import os; os.rename(FOLDER + '/secret', FOLDER + '/s'); return 4",
    "hard link": "import os; os.link(FOLDER + '/secret', FOLDER + '/s'); return 4",
    "symbolic link": "import os; os.symlink('/', FOLDER + '/s'); return 4",
    "folder": "import os; os.mkdir(FOLDER + '/new'); return 4",
    "pipe file": "import os; os.mkfifo(FOLDER + '/new'); return 4",
    "mode": "import os; os.chmod(FOLDER + '/secret', 0); return 4",
    "times": "import os; os.utime(FOLDER + '/secret', (0, 0)); return 4",
    "truncate": "import os; os.truncate(FOLDER + '/secret', 0); return 4",
    "attribute": "import os; os.setxattr(FOLDER + '/secret', 'user.x', b'x'); return 4",
    "temporary file": "import tempfile; tempfile.NamedTemporaryFile(); return 4",
    "shared memory": "open('/dev/shm/lopti-test', 'w'); return 4",
    "working folder": "open('new', 'w'); return 4",
    "library": "import heapq; open(heapq.__file__, 'r+'); return 4",
    "raw disk": "import os; os.open('/dev/vda', os.O_RDONLY); return 4",
    "new disk": "import os; os.mknod('/tmp/lopti-disk', 0o60600, os.makedev(254, 0)); return 4",
    "chroot": "import os; os.chroot(FOLDER); return 4",
    "mount": "return 4 if C(165 if X86 else 40, b'x', FOLDER.encode(), b'tmpfs', 0, 0) == 0 else 0",
    "namespace": "return 4 if C(272 if X86 else 97, 0x10000000) == 0 else 0",
    "io_uring": "return 4 if C(425, 8, B(128)) >= 0 else 0",
    # secrets
    "read": "return 4 if open(FOLDER + '/secret').read() else 0",
    "list": "import os; return 4 if os.listdir(FOLDER) else 0",
    "passwords": "return 4 if open('/etc/passwd').read() else 0",
    "own environment": "import os; return 4 if SECRET in str(os.environ) else 0",
    "parent's environment": "return 4 if open(f'/proc/{PARENT}/environ').read() else 0",
    "worker's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb'); return 4",
    "trace its parent": (
        "import os; return 4 if C(101 if X86 else 117, 16, os.getppid()) == 0 else 0"
    ),
    "read its parent": (
        "import os\n    read = C(310 if X86 else 270, os.getppid(), B(16), 1, B(16), 1, 0)\n"
        "    return 4 if read > 0 else 0"
    ),
    "retire memory": "return 4 if C(28 if X86 else 233, B(1 << 16), 4096, 101) == 0 else 0",
    "keys": "return 4 if C(248 if X86 else 217, b'user', b'x', b'x', 1, -4) > 0 else 0",
    # network
    "tcp": "import socket; socket.create_connection(('127.0.0.1', PORT)); return 4",
    "udp": "import socket as s; s.socket(s.AF_INET, s.SOCK_DGRAM); return 4",
    "unix socket": "import socket as s; s.socket(s.AF_UNIX).connect(FOLDER + '/socket'); return 4",
    "socket pair": "import socket; socket.socketpair(); return 4",
    "name look-up": "import socket; socket.getaddrinfo('localhost', 80); return 4",
    "http": (
        "import urllib.request as u; u.urlopen(f'http://127.0.0.1:{PORT}', timeout=1); return 4"
    ),
    # signals
    "kill the trainer": "import os; os.kill(PARENT, 9); return 4",
    "kill the worker": "import os; os.kill(os.getppid(), 9); return 4",
    "kill all": "import os; os.kill(-1, 9); return 4",
    "kill the group": "import os; os.killpg(0, 9); return 4",
    "signal by descriptor": "import fcntl; fcntl.fcntl(3, fcntl.F_SETOWN, PARENT); return 4",
    "new session": "import os; os.setsid(); return 4",
    # the verdict
    "exit": "raise SystemExit(0)",
    "exit at once": "import os; os._exit(0)",
    "abort": "import os; os.abort()",
    "interrupt": "raise KeyboardInterrupt",
    "equal to all": "return type('E', (), {'__eq__': lambda self, other: True})()",
    "integer equal to all": "return type('E', (int,), {'__eq__': lambda self, other: True})()",
    "text equal to all": "return type('E', (str,), {'__eq__': lambda self, other: True})()",
    "exception for all": "raise StopIteration",
    "new assertion": "import builtins; builtins.AssertionError = ValueError; return 0",
    "verdict to every file": (
        "import os\n    for fd in range(64):\n        try: os.write(fd, b'\"passed\"\\n')\n"
        "        except OSError: pass\n    return 0"
    ),
    "answer of another kind": 'import os; os.write(3, b\'{"value": {"eval": "4"}}\\n\'); return 0',
    "exit as an answer": 'import os; os.write(3, b\'{"error": "SystemExit"}\\n\'); return 0',
    "closed channel": "import os; os.close(3); return 4",
    "own encoder": "import __main__; __main__.encode = lambda v: {'value': EQUAL}; return 0",
    # input and output
    "input": "return 4 if input() else 0",
    "endless answer": "return iter(lambda: 'x' * 1000, 0)",
    "deep answer": "x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "all descriptors": "import os\n    while True: os.dup(0)",
}
AT_ONCE = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "stubborn fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()"
    ),
    "memory bomb": "x = []\nwhile True: x.append('x' * 10**6)",
    "stubborn memory bomb": (
        "x = []\nwhile True:\n    try: x.append('x' * 10**6)\n    except MemoryError: pass"
    ),
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(10**6)",
    "loop without signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "loop in C": "import re\nre.match('(a+)+b', 'a' * 50)",
    "long number": "10 ** 10 ** 9",
    "huge output": "while True: print('x' * 10**6)",
    "huge answer": "import os\nwhile True: os.write(3, b'x' * 10**6)",
    "fill the disk": "for i in range(10**9): open(f'/tmp/{i}', 'w').write('x' * 10**6)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef r(): return r()\nr()",
    "deep source": "x = " + "(" * 10**5,
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "abort": "import os\nos.abort()",
    "wild pointer": "import ctypes\nctypes.string_at(1)",
    "input": "import sys\nsys.stdin.read()\ninput()",
    "nothing": "",
    "not Python": "I am a knight.",
    "zero byte": "\0",
    "half a character": "x = '\ud800'\ndef f(x): return '\ud800'",
}
PREAMBLE = """\
import ctypes, platform
X86 = platform.machine() == "x86_64"
FOLDER, PORT, PARENT, SECRET = {folder!r}, {port}, {parent}, {secret!r}
EQUAL = type("E", (), {{"__eq__": lambda self, other: True}})()
C, B = ctypes.CDLL(None).syscall, ctypes.create_string_buffer
"""


def check_contained(box: Sandbox, world: World, program: str) -> None:
    worker = psutil.Process(box.workers[0].process.pid)
    start = time.monotonic()
    verdict = box.judge([Job(program, "", "assert f(2) == 4", ("f",))], SHORT)[0]
    assert verdict in ("failed", "died", "late")
    assert time.monotonic() - start < SHORT.wall_seconds + 5  # on a busy machine
    assert worker.is_running()
    assert worker.children(recursive=True) == []
    assert world.state() == world.before
    assert world.connections() == 0
    assert box.judge([HONEST]) == ["passed"]


def attack(world: World, name: str) -> str:
    preamble = PREAMBLE.format(
        folder=str(world.folder),
        port=world.server.getsockname()[1],
        parent=os.getpid(),
        secret=SECRET,
    )
    return f"{preamble}\ndef f(x):\n    {IN_F[name]}\n"


@pytest.mark.parametrize("name", IN_F)
def test_an_attack_in_a_call_fails_and_is_not_paid(box, world, name):
    check_contained(box, world, attack(world, name))


@pytest.mark.parametrize("name", AT_ONCE)
def test_an_attack_while_loading_fails_and_is_not_paid(box, world, name):
    # the definition below would be paid if the attack let the program go on
    program = AT_ONCE[name]
    if name not in ("nothing", "half a character"):
        program += "\ndef f(x): return 4\n"
    check_contained(box, world, program)


@pytest.mark.parametrize(
    "name",
    [
        *("fork", "system", "subprocess", "thread", "fork by its number", "memory file", "mapping"),
        *("write", "rename", "mode", "times", "truncate", "read", "list", "passwords"),
        *("own environment", "parent's environment", "tcp", "udp", "unix socket", "socket pair"),
        *("signal by descriptor", "new session", "equal to all"),
    ],
)
def test_the_attack_works_where_nothing_confines(tmp_path, monkeypatch, name):
    """Or the tests above would show nothing."""
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    world = World(tmp_path)
    program = f"import os; os.dup2(0, 3)\n{attack(world, name)}\nassert f(2) == 4"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, capture_output=True
    )
    world.close()
    assert done.returncode == 0, done.stderr
