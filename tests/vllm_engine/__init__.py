"""Tests with a real vLLM on CPU: `make test-vllm`.

Not named vllm, which python would take for the package. A package itself, so that its conftest is
another module than the one above.
"""
