# Each target sets up what it needs. PYTHON and TORCH may be set on the command line.
PYTHON ?= python3.11
# A pinned torch keeps the demo the same everywhere; any torch>=2.6 works (TORCH=torch).
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
DEMO_ARGS ?=

.PHONY: setup setup-dev demo test soak check bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.stamp-run  ## a virtual environment with agentrl, and bubblewrap for sandboxes

setup-dev: $(VENV)/.stamp-dev

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
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

demo: setup  ## train a tool-using policy on this machine, from nothing, in minutes
	$(BIN)/agentrl train --env code_sandbox $(DEMO_ARGS)

test: setup-dev check  ## what CI runs: small counts
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n 2 --dist loadgroup --cov=agentrl --cov-report=term:skip-covered --cov-fail-under=85

soak: setup-dev  ## the full counts
	AGENTRL_SOAK=1 $(BIN)/python -m pytest tests/integration tests/contract tests/unit/train

check: setup-dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup-dev  ## benchmarks of this machine; results belong in docs/benchmarks.md
	for file in benchmarks/import_time.py benchmarks/agent_loop.py benchmarks/env_host.py benchmarks/sandbox_rate.py benchmarks/hf_engine.py; do \
	  echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:  ## remove the virtual environment
	rm -rf $(VENV)
