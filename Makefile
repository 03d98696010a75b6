# make demo | check | test | setup; every target sets up first when pyproject.toml changed.
PYTHON ?= python3
VENV ?= .venv
# installed first, so that pip's resolver does not choose another build; on a machine with an NVIDIA
# GPU any torch that pyproject.toml allows will do
TORCH ?= torch==2.13.0
DEMO ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo check test

help:
	@echo 'make demo    the whole loop on this machine: serve, play, score, train, swap, measure (<= 12 min)'
	@echo 'make check   formatting, lint, types, layers, fast tests'
	@echo 'make test    every test; those for PostgreSQL and Redis need TEST_POSTGRES_URL, TEST_REDIS_URL'
	@echo 'make setup   $(VENV) with everything installed'

setup: $(STAMP)

$(STAMP): pyproject.toml
	@echo 'setup: $(VENV) with $(TORCH) and the project (a few minutes, about 2 GB)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) '$(TORCH)'
	@$(PIP) -e '.[dev]'
	@touch $@
	@$(BIN)/python -c 'import m1serve; print("setup: done, m1serve", m1serve.__version__)'

demo: $(STAMP)
	@$(BIN)/m1serve demo $(DEMO)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -m 'not slow and not services'

test: $(STAMP)
	$(BIN)/pytest -q
