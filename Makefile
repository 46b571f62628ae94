# make demo   sets up .venv and runs the demonstration on the built-in model
# make test   sets up .venv and runs the tests
#
# PYTHON       the interpreter to build .venv with (3.11 to 3.14)
# TORCH_INDEX  a further package index to take torch from, for instance
#                make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
#                make test TORCH_INDEX=https://download.pytorch.org/whl/cu130
#              Empty: whatever pip finds first (on Linux, PyPI's CUDA build).
# PYTEST_ARGS  further arguments for pytest

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SOURCES := $(wildcard cache/native/*.cpp cache/native/*.hpp) CMakeLists.txt pyproject.toml constraints.txt
CODE := agentspec cache backends reasoning benchmarks tests examples docs

.DEFAULT_GOAL := help
.PHONY: help demo test lint types contracts format wheel docs docs-check constraints clean

help:
	@grep -E '^# ?' Makefile | sed 's/^# \{0,1\}//'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch and the build tools come first: the package is then built with exactly these, not with fresh downloads.
$(VENV)/.base: constraints.txt | $(BIN)/python
	@echo "installing torch and the build tools (this can take minutes)"
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.installed-%: $(VENV)/.base $(SOURCES)
	@echo "building and installing agentspec[$*]"
	$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@

demo: $(VENV)/.installed-all
	$(BIN)/agentspec demo

test: $(VENV)/.installed-test
	$(BIN)/agentspec model fetch smollm2-135m
	$(BIN)/agentspec model fetch minilm
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

types: $(VENV)/.installed-test
	$(BIN)/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(VENV)/.installed-test
	$(BIN)/lint-imports --no-logo

wheel: $(VENV)/.installed-test
	$(BIN)/python -m build --no-isolation --outdir dist

docs: $(VENV)/.installed-test
	$(BIN)/python docs/update.py

docs-check: $(VENV)/.installed-test
	$(BIN)/python docs/update.py --check

constraints: $(VENV)/.installed-test
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/^torch==\([^+]*\).*/torch==\1/' > constraints.new
	(head -1 constraints.txt; cat constraints.new) > constraints.both && mv constraints.both constraints.txt
	rm constraints.new

clean:
	rm -rf $(VENV) build dist
