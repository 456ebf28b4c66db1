# make demo        the 2 x 4 mesh of examples/mesh_2x4.py, on 8 processes of this machine
# make test        the tests that need no torch
# make test-torch  the tests against torch, in a virtual environment of their own
# make lint        style gates; make format puts the style right
# make dist        source distribution and wheel in dist/, and a check of the wheel
# make bench       benchmarks against torch; JSON in build/bench/
# make clean       back to a fresh clone
#
# Each installs what it needs on first use: Debian packages by apt if they are missing, the
# rest into .venv. The second time it does only what has changed.

PYTHON ?= python3
TORCH = torch==2.13.0
TOOLS = clang-format==23.1.5 ruff==0.17.6 build==1.6.1
VENV = .venv
TORCH_VENV = .venv-torch
BIN = $(VENV)/bin
TORCH_BIN = $(TORCH_VENV)/bin
# Arguments for pytest: make test PYTEST="-k store"
PYTEST =

C_FILES := $(shell find csrc tests/c -name '*.[ch]' -o -name '*.cc')
PYTHON_FILES = devicemesh tests benchmarks examples scripts setup.py
BUILD_INPUTS := $(shell find csrc -type f) setup.py pyproject.toml

.PHONY: demo test test-torch lint format dist bench build clean

demo: $(VENV)/built $(VENV)/demo
	$(BIN)/python -m devicemesh run -n 8 --timeout 300 examples/mesh_2x4.py

test: $(VENV)/built $(VENV)/test
	$(BIN)/python -m pytest $(PYTEST)

test-torch: $(TORCH_VENV)/built $(TORCH_VENV)/test
	$(TORCH_BIN)/python -m pytest tests/torch $(PYTEST)

lint: $(VENV)/tools
	@echo clang-format --dry-run -Werror csrc tests/c
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)

format: $(VENV)/tools
	@$(BIN)/clang-format -i $(C_FILES)
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)

dist: $(VENV)/tools
	rm -rf dist
	$(BIN)/python -m build -q
	$(BIN)/python scripts/check_wheel.py dist/*.whl

bench: $(TORCH_VENV)/built $(TORCH_VENV)/test
	mkdir -p build/bench
	$(TORCH_BIN)/python benchmarks/import_time.py --json build/bench/import_time.json
	$(TORCH_BIN)/python benchmarks/bringup.py --json build/bench/bringup.json
	$(TORCH_BIN)/python benchmarks/store.py --json build/bench/store.json
	$(TORCH_BIN)/python benchmarks/reduce.py --json build/bench/reduce.json

build: $(VENV)/built

clean:
	rm -rf build dist *.egg-info $(VENV) $(TORCH_VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find devicemesh -name '*.so' -delete

# --- what has been done, as files in the virtual environment --------------------------

%/made:
	scripts/system_packages.sh $(PYTHON)
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install -q 'setuptools>=77'
	touch $@

# In place, so that changes in Python need no build and changes in C a short one.
%/built: %/made $(BUILD_INPUTS)
	$*/bin/python -m pip install -q --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/demo: pyproject.toml | $(VENV)/built
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[demo]'
	touch $@

$(VENV)/test: pyproject.toml | $(VENV)/built
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[demo,test]'
	touch $@

$(TORCH_VENV)/test: pyproject.toml | $(TORCH_VENV)/built
	$(TORCH_BIN)/python -m pip install -q --no-build-isolation -e '.[demo,test]' $(TORCH)
	touch $@

$(VENV)/tools: Makefile | $(VENV)/made
	$(BIN)/python -m pip install -q $(TOOLS)
	touch $@

.PRECIOUS: %/made %/built
