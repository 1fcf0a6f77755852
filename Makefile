# kvrelay: `make demo` shows it working, `make test` tests it.
# Everything is installed into .venv on first use; nothing else on the machine changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Extra arguments for pip, for example the index of a CUDA or CPU build of torch.
PIP_ARGS ?=
ARGS ?=
# Processes that run tests side by side. Tests wait for clusters: three keep two cores busy.
JOBS ?= 3
# No new process for one that crashed: pytest-xdist 3.8 would then wait for its tests forever.
SIDE_BY_SIDE := -n $(JOBS) --max-worker-restart 0
BY_FILE := $(SIDE_BY_SIDE) --dist loadfile --no-loadscope-reorder

KERNELS := $(wildcard kvrelay/engine/attention/native/*.cpp kvrelay/engine/attention/native/*.h)
PROTOS := $(wildcard protos/kvrelay/v1/*.proto)
BUF := $(VENV)/buf/node_modules/.bin/buf
BUF_PACKAGE := @bufbuild/buf@1.75.0

ifneq ($(and $(PYTHON),$(wildcard $(BIN)/python)),)
$(info PYTHON has no effect: $(VENV) is there; `make clean` removes it)
endif

.PHONY: help venv demo up test cover test-slow test-fast test-clients test-vllm test-gpu check buf format protos chaos soak fuzz prove bench clean

help: ## show this list
	@echo "kvrelay: LLM serving with prefill and decode on separate workers"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Arguments go through ARGS: make up ARGS='--prefill 2 --decode 2 --port 50051'"

demo: $(READY) ## start a small cluster, kill workers, check every answer
	@$(BIN)/kvrelay demo $(ARGS)

up: $(READY) ## start a cluster that serves until Ctrl-C
	@$(BIN)/kvrelay up $(ARGS)

test: $(READY) ## run the tests (under ten minutes on two cores)
	@$(BIN)/python -m pytest -m 'not slow and not peer and not vllm and not triton' \
		$(BY_FILE) $(ARGS)

cover: $(READY) ## run the tests with coverage (half as long again)
	@$(BIN)/python -m pytest -m 'not slow and not peer and not vllm and not triton' --cov --cov-report=term $(ARGS)

test-slow: $(READY) ## run the tests that wait for silent peers (20 minutes)
	@$(BIN)/python -m pytest -m 'slow and not peer and not vllm' \
		$(BY_FILE) $(ARGS)

test-fast: $(READY) ## run the tests that start no processes
	@$(BIN)/python -m pytest -m 'not cluster and not slow and not peer and not vllm and not triton' $(ARGS)

# Their environments lie in ~/.cache/kvrelay-tests (6 GB) and are kept between runs and checkouts.
test-clients: $(READY) ## run aiperf, guidellm, vLLM's bench, Node and Chromium
	@$(BIN)/python -m tests.peers.install
	@$(BIN)/python -m pytest -m peer $(ARGS)

# vLLM is that of test-clients; what kvrelay[worker-vllm] adds lies beside it.
test-vllm: $(READY) ## run vLLM with our store: loads, failures, sampling
	@$(BIN)/python -m tests.vllm.environment
	@$(BIN)/python -m pytest -m vllm $(ARGS)

# Torch's CPU build comes without triton, which is 700 MB: installed here, on first use.
test-gpu: $(READY) ## interpret and compile the kernels for GPUs; no GPU is needed
	@if ! $(BIN)/python -c 'import triton' 2>/dev/null \
		&& ! $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -e '.[triton]'; \
		then echo "test-gpu: skipped, pip cannot install triton here"; exit 0; fi; \
	$(BIN)/python -m pytest -m triton $(SIDE_BY_SIDE) tests/engine/cuda tests/engine/torch/test_device_sampler.py $(ARGS)

check: $(READY) buf ## lint, format, types, buf lint, house rules
	@echo "ruff check" && $(BIN)/ruff check --quiet --output-format concise .
	@echo "ruff format --check" && $(BIN)/ruff format --quiet --check .
	@echo "mypy --strict" && $(BIN)/mypy
	@echo "house rules" && $(BIN)/python -m pytest -q tests/house

# Installs buf on first use; later runs need no network. Without npm the house rules still check
# the contract: tests/house/proto_lint.py has the rules of STANDARD.
buf: $(READY) ## lint the .proto files (npm installs buf into .venv/buf)
	@if [ ! -x $(BUF) ] && ! command -v npm >/dev/null; then \
		echo "buf lint: skipped, npm is missing (install Node.js to run it);" \
			"tests/house/test_protos.py checks the same rules"; \
		exit 0; \
	fi; \
	if [ ! -x $(BUF) ] && ! npm install --silent --no-fund --no-audit --ignore-scripts \
		--prefix $(VENV)/buf $(BUF_PACKAGE); then \
		echo "buf lint: skipped, npm cannot install $(BUF_PACKAGE);" \
			"tests/house/test_protos.py checks the same rules"; \
		exit 0; \
	fi; \
	echo "buf lint" && $(BUF) lint

format: $(READY) ## format the sources and fix what can be fixed
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

protos: $(READY) ## regenerate the modules in kvrelay/v1/ from the .proto files
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
		--python_out=. --mypy_out=quiet:. --grpc_python_out=. --mypy_grpc_out=quiet:. $(PROTOS)
	@git status --short kvrelay/v1 2>/dev/null || true

chaos: $(READY) ## kill processes under load, compare: ARGS='--minutes 30'
	@$(BIN)/python -m tests.failures.chaos $(ARGS)

fuzz: $(READY) ## mutated messages to every port: ARGS='--messages 100000'
	@$(BIN)/python -m tests.fuzz.run $(ARGS)

soak: $(READY) ## load a full store: ARGS='--seconds 60 --disk'
	@$(BIN)/python -m tests.kvstore.soak $(ARGS)

prove: $(READY) ## explore all accounting states and mutations (15 minutes)
	@run=$$(mktemp) && $(BIN)/python -m tests.accounting.prove --save $$run $(ARGS) \
		&& $(BIN)/python -m tests.accounting.page $$run && rm $$run

bench: $(READY) ## measure a cluster against plain transformers
	@$(BIN)/kvrelay bench $(ARGS)

venv: $(READY) ## make the virtual environment only

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs only when the dependencies in pyproject.toml have changed, so a second run starts at once
# and needs no network. Changed kernels of the CPU are compiled again.
$(READY): pyproject.toml $(KERNELS)
	@set -e; \
	want=$$(sed '/^\[tool\.ruff\]/,$$d' pyproject.toml | cksum); \
	if [ "$$(cat $@ 2>/dev/null)" = "$$want" ] && [ -x $(BIN)/kvrelay ]; then \
		$(BIN)/python -m kvrelay.engine.attention.native.build || true; \
		touch $@; exit 0; \
	fi; \
	for python in $(wildcard $(BIN)/python) $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
		$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' \
			2>/dev/null && break; python=; \
	done; \
	if [ -z "$$python" ]; then \
		echo "kvrelay needs Python 3.11, 3.12, 3.13 or 3.14; $(or $(PYTHON),python3) here is:" \
			"$$($(or $(PYTHON),python3) --version 2>&1 || true)." \
			"Install one, or say PYTHON=/path/to/python." >&2; \
		exit 1; \
	fi; \
	if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "$$python has no venv module: install it (on Debian: python3-venv)." >&2; exit 1; \
	fi; \
	[ -x $(BIN)/python ] || { echo "Making $(VENV) with $$($$python --version)"; \
		$$python -m venv $(VENV); }; \
	echo "Installing kvrelay and what it needs into $(VENV) (first time: some minutes)"; \
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -e '.[dev]' \
		| grep --line-buffered -v '^Requirement already satisfied' || exit 1; \
	echo "$$want" > $@; \
	echo "Ready"
