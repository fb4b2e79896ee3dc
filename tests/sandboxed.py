"""Skips tests that run programs where these cannot be confined: no Linux, Landlock or seccomp."""

import pytest

from lopti_trl.tasks.sandbox import Sandbox, SandboxUnavailable


def need_sandbox() -> None:
    try:
        Sandbox(1).close()
    except SandboxUnavailable as error:
        pytest.skip(str(error), allow_module_level=True)
