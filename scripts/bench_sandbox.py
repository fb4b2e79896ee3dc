"""Throughput of the sandbox on honest programs, each judged in two processes of its own.

python scripts/bench_sandbox.py --programs 1000 --workers 2
"""

import argparse
import os
import time

from lopti_trl.tasks.sandbox import Job, Sandbox

CALLS = 10
PROGRAM = """\
import math
from collections import Counter

def f(n):
    squares = Counter(math.isqrt(i) ** 2 == i for i in range(1, n + 1))
    return squares[True] + {index}
"""
TESTS = """\
for root in range(1, {calls} + 1):
    assert f(root * root) == root + {index}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    jobs = [
        Job(PROGRAM.format(index=i), "", TESTS.format(index=i, calls=CALLS), ("f",))
        for i in range(args.programs)
    ]
    start = time.perf_counter()
    box = Sandbox(args.workers)
    ready = time.perf_counter()
    passed = box.judge(jobs).count("passed")
    seconds = time.perf_counter() - ready
    used = os.times()
    box.close()
    ended = os.times()
    spent = sum(ended[2:4]) + sum(used[:2])
    print(
        f"{passed} of {args.programs} honest programs passed, {CALLS} calls each, by {args.workers}"
        f" workers (started in {ready - start:.2f} s): {seconds:.1f} s, "
        f"{args.programs / seconds:.0f} a second; {1000 * spent / args.programs:.1f} ms of "
        f"processor time each. Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    )


if __name__ == "__main__":
    main()
