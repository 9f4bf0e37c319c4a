# Everything runs in .venv, which is made on first use and brought up to date when pyproject.toml or constraints.txt change.
# PYTHON=/path/to/python3.11 chooses the interpreter.
SHELL := /bin/sh
BIN := .venv/bin
WORKERS ?= 2
RUN ?= runs/demo
CORE := .venv/.installed-core
DEV := .venv/.installed-dev
DOCS := .venv/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow reliability lint format types mutants bench docs size clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(CORE) ## train a character LSTM for about 90 seconds, judge it, sample from it
	$(BIN)/elman train --preset demo --out $(RUN) --overwrite
	$(BIN)/elman eval $(RUN) --baselines
	$(BIN)/elman sample $(RUN) --prompt 'The ' --temperature 0.3
	$(BIN)/elman sample $(RUN) --prompt 'The ' --temperature 0.8
	$(BIN)/elman sample $(RUN) --prompt 'The ' --temperature 1.5
	@echo "The run lies in $(RUN); go on with: $(BIN)/elman sample $(RUN) --prompt 'In Python, '"

test: $(DEV) ## run the fast test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

test-slow: $(DEV) ## run the tests that take longer
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m slow

reliability: $(DEV) ## put every fault into real runs: kills, full disks, signals, damage
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/run.py $(CAMPAIGNS)

lint: $(DEV) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV) ## bring style and formatting into order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV) ## check the types
	$(BIN)/mypy

mutants: $(DEV) ## plant named faults one at a time; a test must catch each
	$(BIN)/python tools/mutants.py

bench: $(DEV) ## compare the preset cpu-1min with a plain LSTM: make bench TEXT=tiny-shakespeare.txt
	@test -n "$(TEXT)" || { echo "make bench: name the text, as in make bench TEXT=tiny-shakespeare.txt"; exit 2; }
	$(BIN)/python benchmarks/quality.py $(TEXT)

docs: $(DOCS) ## build the documentation into docs/_build/html
	$(BIN)/sphinx-build -q -W -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

size: $(DEV) ## print lines of code per layer and the number of settings
	$(BIN)/python -m pytest -q -s -p no:xdist tests/house/test_budget.py

clean: ## remove everything that was built; runs and .venv stay
	rm -rf build dist docs/_build .pytest_cache .hypothesis .mypy_cache .ruff_cache src/*.egg-info
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml constraints.txt tools/setup.sh
	@tools/setup.sh
	@touch $@

$(DEV): pyproject.toml constraints.txt tools/setup.sh
	@tools/setup.sh dev,data,track,tune
	@touch $@ $(CORE)

$(DOCS): pyproject.toml constraints.txt tools/setup.sh
	@tools/setup.sh docs
	@touch $@
