# make demo        sets up .venv and runs the demonstration on the built-in model
# make test        what to run while changing something: every invariant, in a few minutes
# make check       everything that must hold before a change is merged: lint, documentation, types, import contracts,
#                  and all tests but the long ones, with coverage
# make check-long  what takes from minutes to an hour: faults and load at full length, real servers of vLLM and SGLang
# make site        the documentation with search and a reference, in build/site/html; warnings are errors
# make engines     compares the plug-ins with the newest vLLM, nightly builds included, and SGLang
# make mutants     breaks the guards of exactness and of requests one by one; a test has to notice each
#
# make gpu-prepare  fills the folder GPU with wheels, TRACES and TOKENIZER, for a machine with a GPU and without a network
# make gpu          runs there what was not measured yet; the folder alone does too: gpu/run
#
# PYTHON       the interpreter to build .venv with (3.11 to 3.14)
# TORCH_INDEX  a further package index to take torch from, for instance
#                make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
#                make test TORCH_INDEX=https://download.pytorch.org/whl/cu130
#              Empty: whatever pip finds first (on Linux, PyPI's CUDA build).
# LOCK         requirements.lock: install what it lists by hash before anything else, as the hosted CI does. Empty: take
#              the versions of constraints.txt from any index.
# WORKERS      how many processes run tests (3); 0 runs them in pytest's own, as a debugger wants it
# PYTEST_ARGS  further arguments for pytest

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
LOCK ?=
WORKERS ?= 3
PYTEST_ARGS ?=

BIN := $(VENV)/bin
# Python makes bytecode of what is imported, once; pip would make it of everything, a third of an installation's work.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
PIP := $(INSTALL) --constraint constraints.txt
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
DEMO := torch,langgraph,proxy
NATIVE := $(wildcard cache/native/*.cpp cache/native/*/*.cpp cache/native/*/*.hpp)
SOURCES := $(NATIVE) CMakeLists.txt pyproject.toml constraints.txt
CODE := agentspec cache backends reasoning benchmarks tests examples docs

# Tests start hundreds of processes: without bytecode each would compile every module anew, a quarter of all time.
unexport PYTHONDONTWRITEBYTECODE

# As many workers as cores, and one more, since tests wait for timers and disks a third of the time: with threads of
# their own they would mostly wait for one another.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test check check-static check-tests check-long engines mutants lint types mypy pyright contracts format wheel docs docs-check site recording constraints lock gpu gpu-prepare clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: constraints.txt $(LOCK) | $(BIN)/python
	$(if $(LOCK),$(INSTALL) --require-hashes --no-deps -r $(LOCK))
	$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

# torch and the build tools come first: the package is then built with exactly these, not with fresh downloads.
$(VENV)/.base: $(VENV)/.tools
	@echo "installing torch and the build tools (this can take minutes)"
	$(PIP) $(INDEX) torch
	@touch $@

$(VENV)/.installed-%: $(VENV)/.base $(SOURCES)
	@echo "building and installing this package with its extra [$*]"
	$(PIP) $(if $(LOCK),--no-deps) --no-build-isolation --editable '.[$*]'
	$(if $(LOCK),$(BIN)/python -m pip check)
	@touch $@

# For the demonstration the package is compiled while pip installs what it imports, and then the model is fetched.
NEEDS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    print(*p["dependencies"], *(need for extra in "$(DEMO)".split(",") for need in p["optional-dependencies"][extra]), sep="\n")

$(VENV)/.needs: pyproject.toml $(VENV)/.tools
	@echo "installing torch and other packages (this can take minutes), and fetching a model"
	$(BIN)/python -c '$(NEEDS)' > $@.txt
	$(PIP) $(INDEX) -r $@.txt
	PYTHONPATH=. $(BIN)/python -c 'from agentspec.backends.model_store import resolve; resolve("smollm2-135m")'
	@touch $@ $(VENV)/.base

$(VENV)/.native: $(SOURCES) $(VENV)/.tools
	@echo "building this package"
	CMAKE_ARGS="-DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=12 $(CMAKE_ARGS)" $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

demo:
	$(MAKE) -j2 $(VENV)/.needs $(VENV)/.native
	$(BIN)/agentspec demo

test: $(VENV)/.installed-test
	$(BIN)/agentspec model fetch smollm2-135m
	$(BIN)/agentspec model fetch minilm
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --benchmark-disable $(CHOICE) $(PYTEST_ARGS)

# All tests but the longest. Coverage is that of the quick ones, and of slow ones that alone reach some code: the other slow
# ones are broader versions of quick ones, and take up to five times as long when every line they run is counted; so do
# properties with their many examples (`no_cover` in tests/conftest.py).
check-tests: CHOICE = --hypothesis-profile=ci -m "not (long or mutants)" --cov
check-tests: test

# What reads the source and runs none of it, two at a time.
check-static: $(VENV)/.installed-test
	$(MAKE) -j2 pyright mypy lint docs-check contracts

check: check-static check-tests

# vLLM and SGLang are downloads of 400 MB each into environments of their own, agent frameworks one of 150 MB; without
# them the tests of real servers and of these clients are skipped.
check-long: CHOICE = --hypothesis-profile=long -m "long or hypothesis"
check-long: WORKERS = 0
check-long: export AGENTSPEC_VLLM_ENV = $(CURDIR)/.ci/vllm
check-long: export AGENTSPEC_SGLANG_ENV = $(CURDIR)/.ci/sglang
check-long: export AGENTSPEC_CLIENTS_ENV = $(CURDIR)/.ci/clients
check-long: export AGENTSPEC_DEPLOY_ENV = $(CURDIR)/.ci/deploy
check-long: .ci/vllm/bin/vllm .ci/sglang/.complete .ci/clients/.complete .ci/deploy/.complete test

.ci/vllm/bin/vllm:
	-PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) .ci/vllm-env .ci/vllm

.ci/sglang/.complete: .ci/sglang-env
	-PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) .ci/sglang-env .ci/sglang && touch $@

.ci/clients/.complete: .ci/clients-env
	-PYTHON=$(PYTHON) .ci/clients-env .ci/clients && touch $@

.ci/deploy/.complete: .ci/deploy-env
	-PYTHON=$(PYTHON) .ci/deploy-env .ci/deploy && touch $@

engines: $(VENV)/.installed-test
	PIP_PRE=1 PIP_EXTRA_INDEX_URL=https://wheels.vllm.ai/nightly AGENTSPEC_NEWEST_ENGINES=1 \
		$(BIN)/python -m pytest -m long -k newest $(PYTEST_ARGS) tests/backends/vllm tests/backends/sglang

mutants: CHOICE = -m mutants
mutants: test

lint: $(VENV)/.installed-test
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/clang-format -i $(NATIVE)

types: mypy pyright

mypy: $(VENV)/.installed-test
	$(BIN)/mypy

pyright: $(VENV)/.installed-test
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(VENV)/.installed-test
	$(BIN)/lint-imports --no-logo

wheel: $(VENV)/.installed-test
	$(BIN)/python -m build --no-isolation --outdir dist

docs: $(VENV)/.installed-test
	$(BIN)/python docs/update.py

docs-check: $(VENV)/.installed-test
	$(BIN)/python docs/update.py --check

site: $(VENV)/.installed-test
	$(BIN)/python docs/site.py
	cd build/site && $(abspath $(BIN))/zensical build --strict

recording: $(VENV)/.installed-test
	$(BIN)/python docs/record.py

constraints: $(VENV)/.installed-test
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/^torch==\([^+]*\).*/torch==\1/' > constraints.new
	(head -1 constraints.txt; cat constraints.new) > constraints.both && mv constraints.both constraints.txt
	rm constraints.new
	$(MAKE) lock

# torch is not in it: its builds differ by index, and each index serves its own.
lock: $(VENV)/.installed-test
	grep -v '^torch==' constraints.txt | $(BIN)/uv pip compile - --python $(BIN)/python --python-version 3.11 --quiet \
	    --no-config --universal --no-deps --generate-hashes --no-annotate --no-header --output-file lock.new
	(echo "# The packages of constraints.txt but torch, with the hashes of their files. Regenerate with: make lock"; \
	    cat lock.new) > requirements.lock
	rm lock.new

GPU ?= gpu
TRACES ?=
TOKENIZER ?=

gpu-prepare: $(VENV)/.installed-test
	$(BIN)/python -m agentspec.benchmarks.gpu.parts prepare $(GPU) --traces $(TRACES) --tokenizer $(TOKENIZER) $(DRY)

gpu:
	$(GPU)/run

clean:
	rm -rf $(VENV) build dist
