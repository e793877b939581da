# The two commands a newcomer needs are `make demo` and `make test`; `make help` lists the others.

PYTHON ?= python3
BIN := .venv/bin
SOURCES := graph nodes runtime programs src/penstock/__init__.py tests benchmarks docs

.PHONY: help demo test slow lint format clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' $(MAKEFILE_LIST)

.venv/installed: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) sh scripts/install.sh .
	@touch $@

.venv/developing: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) sh scripts/install.sh '.[dev]'
	@touch .venv/installed $@

demo: .venv/installed  ## a small model learns arithmetic by asynchronous RL, on this machine
	$(BIN)/penstock run aipo

test: .venv/developing  ## the test suite, without what is marked slow
	$(BIN)/python -m pytest -q -m 'not slow'

slow: .venv/developing  ## the tests that are marked slow
	$(BIN)/python -m pytest -q -m slow

lint: .venv/developing  ## linter, formatter and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/developing  ## let the formatter write
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what make has made
	rm -rf .venv build src/penstock.egg-info
