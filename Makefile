# The two commands a newcomer needs are `make demo` and `make test`; `make help` lists the others.

PYTHON ?= python3
BIN := .venv/bin
# Four tests at a time on two cores: most tests wait for processes half of the time. The order is that of
# tests/conftest.py. OpenMP's threads sleep while they wait for each other, and NumPy has one: if they spun, they
# would take a core that another test needs.
PYTEST := OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 4 --no-loadscope-reorder --durations 20 --durations-min 10

# Thousands of processes import the same modules in these tests. With bytecode files, only one compiles each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test slow vllm lint docs format clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' $(MAKEFILE_LIST)

.venv/installed: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) sh scripts/install.sh .
	@touch $@

.venv/developing: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) sh scripts/install.sh '.[dev]'
	@touch .venv/installed $@

.venv/documenting: .venv/installed pyproject.toml
	PYTHON=$(PYTHON) sh scripts/install.sh '.[docs]'
	@touch $@

demo: .venv/installed  ## a small model learns arithmetic by asynchronous RL, on this machine
	$(BIN)/penstock run aipo

test: .venv/developing  ## the test suite, without what is marked slow
	$(PYTEST) --dist loadfile -m 'not slow'

slow: .venv/developing  ## the tests that are marked slow
	$(PYTEST) --dist loadgroup -m slow

vllm: .venv/developing  ## the tests that need vLLM, which is installed for them and removed again
	sh scripts/vllm.sh

lint: .venv/developing  ## linters, formatter and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Containerfile

docs: .venv/documenting  ## the site of the documentation, in build/site; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: .venv/developing  ## let the formatter write
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what make has made
	rm -rf .venv build src/penstock.egg-info
