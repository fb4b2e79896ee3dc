"""The sandbox for honest programs, its life with the trainer, and where it refuses to work."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from sandboxed import need_sandbox

from lopti_trl.tasks.sandbox import Job, Limits, Sandbox

need_sandbox()

ROOT = Path(__file__).resolve().parents[1]
SHORT = Limits(cpu_seconds=1, wall_seconds=1.0, memory_bytes=1 << 28)
HONEST = Job("def f(x):\n    return 2 * x", "", "assert f(2) == 4", ("f",))
LOOP = HONEST._replace(program="while 1: pass")
SLEEP = HONEST._replace(program="import time; time.sleep(99)")


@pytest.fixture(scope="module")
def box():
    sandbox = Sandbox(1)
    yield sandbox
    sandbox.close()


def judge(box: Sandbox, program: str, tests: str = HONEST.tests, setup: str = "") -> str:
    return box.judge([Job(program, setup, tests, ("f",))])[0]


# Verdicts


def test_verdicts_are_told_apart(box):
    assert judge(box, "def f(x): return 4") == "passed"
    assert judge(box, "def f(x): return 5") == "failed"
    assert judge(box, "def f(x): return 1 / 0") == "failed"
    assert judge(box, "def f(x) return 4") == "failed"
    assert judge(box, "def g(x): return 4") == "failed"
    assert judge(box, "import os; os._exit(0)") == "died"
    assert box.judge([SLEEP], SHORT) == ["late"]


def test_processor_time_is_limited_apart_from_the_wall_clock(box):
    assert box.judge([LOOP], Limits(1, 60.0)) == ["died"]


def test_memory_is_limited(box):
    programs = [f"x = bytearray({size} << 20)\ndef f(x): return 4" for size in (100, 400)]
    jobs = [HONEST._replace(program=program) for program in programs]
    assert box.judge(jobs, Limits(memory_bytes=256 << 20)) == ["passed", "failed"]


def test_the_tests_themselves_are_limited(box):
    assert box.judge([HONEST._replace(tests="while f(2): pass")], SHORT) == ["late"]
    assert judge(box, HONEST.program, "f(2); raise SystemExit") == "died"


def test_a_function_of_the_setup_is_not_the_programs(box):
    program = "def helper(x): return 0\ndef f(x): return 1"
    setup = "def helper(x): return x * x\ndef f(x): 'to be written'"
    assert judge(box, program, "assert helper(f(9)) == 0", setup) == "failed"
    assert judge(box, program, "assert helper(f(9)) == 1", setup) == "passed"


# Values

VALUES = [
    *(None, True, 0, -1, 2**200, 1.5, float("inf"), -0.0, 1j, "", 'a\n\\"', "\ud800", b"\x00\xff"),
    *([], [1, [2]], (), (1,), ((1, 2), [3]), {}, {1: "a", (2, 3): [4]}, range(9, 1, -2)),
    *({"tuple": [1]}, [{"set": 1}]),
]


@pytest.mark.parametrize("value", VALUES, ids=ascii)
def test_a_value_comes_back_as_it_was(box, value):
    tests = f"inf = float('inf')\nv = {value!r}\nassert f(v) == v and repr(f(v)) == repr(v)"
    assert judge(box, "def f(x): return x", tests) == "passed"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{1, 2}", "{2, 1}"),
        ("{frozenset({4})}", "{frozenset({4})}"),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"),
        ("__import__('collections').OrderedDict(a=1)", "{'a': 1}"),
        ("__import__('collections').namedtuple('P', 'x y')(1, 2)", "(1, 2)"),
        ("__import__('fractions').Fraction(1, 3)", "Fraction(1, 3)"),
        ("__import__('decimal').Decimal('0.1')", "Decimal('0.1')"),
        ("__import__('numpy').arange(3)", "[0, 1, 2]"),
        ("__import__('numpy').float32(1.5)", "1.5"),
        ("bytearray(b'x')", "b'x'"),
        ("{1: 2}.keys()", "{1}"),
        ("{1: 2}.items()", "{(1, 2)}"),
    ],
)
def test_other_values_become_equal_plain_ones(box, expression, expected):
    imports = "from fractions import Fraction\nfrom decimal import Decimal\n"
    program = f"def f(): return {expression}"
    assert judge(box, program, f"{imports}assert f() == {expected}") == "passed"
    assert judge(box, program, f"{imports}assert f() != {expected}") == "failed"


def test_iterators_cross_and_objects_do_not(box):
    assert judge(box, "def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]") == "passed"
    endless = "import itertools\ndef f(): return itertools.count()"
    assert judge(box, endless, "assert next(f()) == 0") == "passed"
    assert judge(box, "def f(): return map(abs, [-1])", "assert list(f()) == [1]") == "passed"
    assert judge(box, "def f(): return object()", "f()") == "failed"
    assert judge(box, "def f(g): return 1", "f(lambda: 1)") == "failed"


@pytest.mark.parametrize("name", ["ValueError", "KeyError", "ZeroDivisionError", "TypeError"])
def test_exceptions_cross(box, name):
    tests = "try: f()\nexcept {}: ok = True\nassert ok"
    program = f"def f(): raise {name}('x')"
    assert judge(box, program, tests.format(name)) == "passed"
    assert judge(box, program, tests.format("OSError")) == "failed"


@pytest.mark.parametrize("name", ["StopIteration", "SystemExit", "GeneratorExit", "MyError"])
def test_no_exception_ends_the_tests_early(box, name):
    program = f"class MyError(BaseException): pass\ndef f(x): raise {name}"
    assert judge(box, program, "assert all(map(f, [1, 2]))") == "failed"
    assert judge(box, program, "for y in map(f, [1, 2]): assert y") == "failed"


# What a program knows

HUNT = """
import gc, re, sys
def f(x):
    seen, todo = set(), [*gc.get_objects(), sys._getframe()]
    while todo:
        thing = todo.pop()
        if id(thing) in seen: continue
        seen.add(id(thing))
        if isinstance(thing, (str, bytes)):
            found = re.search("NON" + r"CE-\\d+", str(thing))
            if found: return found[0]
        else:
            todo += gc.get_referents(thing)
    return str(len(seen))
"""


def test_a_program_finds_no_tests_in_its_memory(box):
    nonce = f"NONCE-{os.getpid()}"
    box.judge([HONEST._replace(tests=f"assert f(2) == 4 # {nonce}")])
    assert judge(box, HUNT, f"assert f(2) == {nonce!r}") == "failed"
    assert judge(box, HUNT, "assert int(f(2)) > 10000") == "passed"  # it has looked around
    box.judge([HONEST._replace(program=f"{HONEST.program} # {nonce}")])
    assert judge(box, f"mine = {nonce!r}\n{HUNT}", f"assert f(2) == {nonce!r}") == "passed"


def test_a_program_leaves_nothing_to_the_next(box):
    leave = "import builtins, os, math\nbuiltins.left = math.left = 4\nos.environ['LEFT'] = '4'\n"
    found = "hasattr(builtins, 'left') or hasattr(math, 'left') or 'LEFT' in os.environ"
    look = f"import builtins, math, os\ndef f(x): return {found}"
    assert judge(box, leave + look, "assert f(2)") == "passed"
    assert judge(box, look, "assert f(2)") == "failed"


def test_a_program_computes_the_same_in_every_worker():
    program = "import random\ndef f(): return [str({*'abcdefgh'}), hash('x')]"
    expected = subprocess.run(
        [sys.executable, "-c", "print([str({*'abcdefgh'}), hash('x')])"],
        env={"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    ).stdout
    box = Sandbox(2)
    job = Job(program, "", f"assert f() == {expected}", ("f",))
    assert box.judge([job] * 6) == ["passed"] * 6
    box.close()


# The trainer


def test_many_programs_keep_their_order_and_run_side_by_side():
    box = Sandbox(2)
    jobs = [HONEST._replace(program=f"def f(x): return {i % 3 + 3}") for i in range(30)]
    assert box.judge(jobs) == ["failed", "passed", "failed"] * 10
    start = time.monotonic()
    assert box.judge([SLEEP] * 6, SHORT) == ["late"] * 6
    assert 3 <= time.monotonic() - start < 5.5  # three rounds of 1 s, not six
    box.close()


def wait_for_programs(worker: psutil.Process) -> list[psutil.Process]:
    while len(worker.children()) < 2:
        time.sleep(0.02)
    return worker.children()


def test_a_worker_that_is_killed_is_replaced_and_takes_its_programs_with_it():
    box = Sandbox(1)
    worker = psutil.Process(box.workers[0].process.pid)
    verdicts = []
    nap = HONEST._replace(program=f"import time\ntime.sleep(0.5)\n{HONEST.program}")
    thread = threading.Thread(target=lambda: verdicts.extend(box.judge([nap, HONEST])))
    thread.start()
    programs = wait_for_programs(worker)
    worker.kill()
    assert psutil.wait_procs(programs, timeout=10)[1] == []
    thread.join(30)
    assert verdicts == ["passed", "passed"]
    assert box.workers[0].process.pid != worker.pid
    box.close()


def start_python(program: str, *prefix: str, **options) -> subprocess.Popen:
    imports = "from lopti_trl.tasks.sandbox import Job, Limits, Sandbox, SandboxUnavailable, judge"
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", f"{imports}\n{program}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_nothing_is_left_of_a_trainer_that_is_killed():
    script = """
box = Sandbox(1)
print(box.workers[0].process.pid, flush=True)
box.judge([Job("while 1: pass", "", "f()", ("f",))], Limits(60, 60.0))
"""
    with start_python(script) as trainer:
        worker = psutil.Process(int(trainer.stdout.readline()))
        family = [worker, *wait_for_programs(worker)]
        trainer.kill()
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_a_forked_process_gets_workers_of_its_own():
    script = """
import os
job = Job("def f(): return 4", "", "assert f() == 4", ("f",))
assert judge([job]) == ["passed"]
pid = os.fork()
assert judge([job] * 5) == ["passed"] * 5
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    print("both")
"""
    with start_python(script) as process:
        assert process.stdout.read() == "both\n"


# Where programs cannot be confined

BLOCKED = """
import pyseccomp
calls = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
RULES
calls.load()
try:
    print(Sandbox(1).judge([Job("def f(x): return 4", "", "assert f(2) == 4", ("f",))]))
except SandboxUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (["ERRNO(38), 'landlock_create_ruleset'"], "Cannot find Landlock syscalls"),
        (["ERRNO(1), 'landlock_restrict_self'"], "landlock_restrict_self"),
        (
            ["ERRNO(1), 'seccomp'", "ERRNO(1), 'prctl', pyseccomp.Arg(0, pyseccomp.EQ, 22)"],
            "a process cannot be confined",
        ),
    ],
)
def test_no_program_runs_where_the_kernel_does_not_confine(rules, reason):
    rules = "\n".join(f"calls.add_rule(pyseccomp.{rule})" for rule in rules)
    with start_python(BLOCKED.replace("RULES", rules)) as process:
        output = process.stdout.read()
    assert output.startswith("untrusted programs cannot be confined here, so none is run")
    assert reason in output
    assert "Linux 5.13" in output


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "landlock", None)
    with pytest.raises(ImportError, match=r"needs landlock.*pip install 'lopti-trl\[code\]'"):
        Sandbox(1)


def test_it_needs_no_privilege(tmp_path):
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("the tests run without privilege already, or setpriv is not here")
    # the one capability kept is to read any file, since Python may lie in root's folder
    kept = "-all,+dac_read_search"
    ordinary = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    ordinary += [f"--inh-caps={kept}", f"--ambient-caps={kept}", f"--bounding-set={kept}"]
    script = """
import os
assert os.getuid() == 65534
programs = ["def f(x): return 4", "import os\\nos.fork()\\ndef f(x): return 4"]
print(Sandbox(1).judge([Job(p, "", "assert f(2) == 4", ("f",)) for p in programs]))
"""
    with start_python(script, *ordinary, cwd=tmp_path) as process:
        assert process.stdout.read() == "['passed', 'failed']\n"
