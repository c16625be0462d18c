# Everything here works from a fresh clone and needs python3 (3.11 to 3.13), make and the package index.
PYTHON ?= python3
PROFILE ?= smollm2-135m-demo
UV_VERSION = 0.13.9
# A test run that hangs is ended after this many seconds.
ORCHESTRATOR_TESTS_SECONDS ?= 1800
ENGINE_TESTS_SECONDS ?= 1800
SGLANG_TESTS_SECONDS ?= 600
TESTS ?= not gpu
# Environments whose tests run at once; with 1 one after the other, and what they say is seen at once.
TEST_JOBS ?= 2
PYTEST_OPTIONS ?=

BIN := .envs/orchestrator/bin
ENGINE := .envs/engine-cpu
# The loader reads it when the interpreter starts; vLLM on the CPU is much slower without it.
PRELOAD = LD_PRELOAD=$(wildcard $(CURDIR)/$(ENGINE)/lib/libiomp5.so)

.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang demo test test-orchestrator test-engine test-sglang lint docs compatibility lock clean

help:  ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Create both environments from their lock files, if they are missing
	@command -v $(PYTHON) > /dev/null || { echo "setup failed: there is no $(PYTHON); install Python 3.11 to 3.13" >&2; exit 2; }
	@$(PYTHON) deployments/bootstrap.py

setup-sglang:  ## Create the environment for capture with SGLang on the CPU
	@$(PYTHON) deployments/bootstrap.py --sglang

demo: setup  ## Train a draft for SmolLM2-135M and measure it in vLLM
	@$(BIN)/eagle3 run $(PROFILE)

test: setup  ## Run all tests that need no GPU, both environments at once (TESTS="not gpu and not slow" for fewer)
	@$(MAKE) --no-print-directory --keep-going --jobs=$(TEST_JOBS) \
		$(if $(filter 1,$(TEST_JOBS)),,--output-sync=target) test-orchestrator test-engine

test-orchestrator:  # the environment without torch
	timeout --kill-after=20 $(ORCHESTRATOR_TESTS_SECONDS) $(BIN)/python -m pytest -m "$(TESTS)" $(PYTEST_OPTIONS)

test-engine:  # the environment without Prefect
	timeout --kill-after=20 $(ENGINE_TESTS_SECONDS) env $(PRELOAD) \
		$(ENGINE)/bin/python -m pytest -m "(engine or both) and $(TESTS)" $(PYTEST_OPTIONS)

test-sglang: setup-sglang  ## Run the tests of capture with SGLang, in its environment
	timeout --kill-after=20 $(SGLANG_TESTS_SECONDS) \
		.envs/engine-sglang-cpu/bin/python -m pytest -m "sglang and not gpu" $(PYTEST_OPTIONS)

lint: setup  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup  ## Make docs/configuration.md again from the configuration models
	$(BIN)/python docs/make_configuration.py

compatibility: setup  ## Make docs/compatibility.md again from the records of probes in docs/compatibility
	$(BIN)/python docs/make_compatibility.py

lock:  ## Compile the lock files again with uv
	$(PYTHON) -m venv .envs/uv
	.envs/uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(PYTHON) docker/locks/compile.py .envs/uv/bin/uv

clean:  ## Remove the environments and tool caches; runs and artifacts in workspace/ stay
	rm -rf .envs .mypy_cache .ruff_cache .pytest_cache *.egg-info
