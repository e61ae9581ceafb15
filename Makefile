# Needs Python 3.11+, pip and make; the first target you run builds .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Idle OpenMP threads sleep instead of spinning: on few cores spinning steals the time of the worker.
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Compiled test files are kept: pytest rewrites their assertions, which takes longer than importing them.
unexport PYTHONDONTWRITEBYTECODE

# Two test processes with one thread each; more threads would only fight for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
# Options such as FUZZ='--seed 1 --area tables'.
FUZZ ?=

.PHONY: help demo test test-slow fuzz kills mutants lint bench costs results your-data docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small network and show its uncertainty
	$(BIN)/neuboots demo

test: $(READY)  ## the quick tests, and the examples of the docstrings and the README
	$(PYTEST) -n 2

# Exit code 5 is "no test selected": a tree without slow tests has not failed.
test-slow: $(READY)  ## the slow tests
	$(PYTEST) -n 2 -m slow || [ $$? -eq 5 ]

fuzz: $(READY)  ## 2,000 random inputs, and the table of what happened (6 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --cases 2000 --seed 0 $(FUZZ)

kills: $(READY)  ## 30 kills at random moments of each long command
	OMP_NUM_THREADS=1 $(BIN)/python tests/kills.py $(or $(KILLS),30)

mutants: $(READY)  ## the mutation score of the core modules (resumable)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mutation --jobs 2 $(MUTANTS)

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## the benchmarks
	$(BIN)/python -m benchmarks

costs: $(READY)  ## what each method costs, K = 1 … 5: the table of docs/methods.md (15 minutes)
	$(BIN)/python -m benchmarks.costs

results: $(READY)  ## docs/results.md and the pages of other studies from the committed rows
	$(BIN)/neuboots report results/cpu --without uci validity dimensions same-weights --out docs/results.md
	$(BIN)/neuboots report results/cpu/uci --out docs/uci.md
	$(BIN)/neuboots report results/cpu/validity --out docs/validity-details.md
	$(BIN)/neuboots report results/cpu/dimensions --out docs/dimensions.md
	$(BIN)/neuboots report results/cpu/same-weights --out docs/same-weights.md
	$(BIN)/python docs/make_validity.py

your-data: $(READY)  ## outputs of docs/your-data.md from a real run (1 minute)
	$(BIN)/python docs/make_your_data.py

docs: $(READY)  ## run the examples of the documentation and check its links
	$(PYTEST) -n 2 docs
	$(BIN)/python docs/check_links.py

clean:  ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made again whenever the dependencies change; otherwise the set-up costs nothing.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "neuboots needs Python 3.11 or newer, but '$(PYTHON)' is older or missing: try make PYTHON=/path/to/python3.11." >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
