# make serve | make test | make check | make bench: each sets up what it needs and is quick again.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/cpu.txt

.PHONY: setup serve test golden check bench clean

setup: $(VENV)/.serve

serve: setup
	$(BIN)/headrace serve --port $(PORT) $(ARGS)

test: $(VENV)/.test
	scripts/test $(ARGS)

golden: $(VENV)/.test
	$(BIN)/pytest tests/golden -m "full or not full" $(ARGS)

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.engine_overhead $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo 'on Debian: apt install python3-venv' >&2; exit 1; }

$(VENV)/.serve: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[test]"
	@touch $@

$(VENV)/.check: $(VENV)/.test
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[test,check]"
	@touch $@
