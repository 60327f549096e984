# Each target sets up .venv if needed, and does nothing when nothing has changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# pip would compile 20,000 modules. Python compiles those that it imports, and keeps the bytecode.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
          --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-gpu test-models references check docs format clean

serve: $(VENV)/.runtime
	@$(BIN)/tk serve $(ARGS)

# Test files run side by side, in one process more than there are cores, since some wait; at most 4:
# an engine test takes 1 to 2 GB. They keep their order by name. The usual order puts files with few
# tests last, and some of those take a minute. make test ARGS="-m quick" takes under a minute.
JOBS_HERE = $(shell $(BIN)/python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS_HERE) --dist loadfile --no-loadscope-reorder $(ARGS)

# On a machine with an NVIDIA GPU, in the Python that has its torch:
#     PYTHON=python3 make test-gpu JOBS=8
# Tests that need the GPU for themselves run last, one by one. Exit code 5: ARGS select none. Other
# files are left out: they import packages that such a Python may not have.
GPU_TESTS = $(if $(findstring tests/,$(ARGS)),, \
  tests/kernels $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests))
test-gpu:
	@$(PYTHON) -c 'import toolkit.kernels' || { \
	  echo "Install this checkout into $(PYTHON) first:" \
	    "$(PYTHON) -m pip install --no-deps --no-build-isolation --editable ." >&2; exit 1; }
	$(PYTHON) -m pytest $(GPU_TESTS) -m "gpu and not alone" $(if $(JOBS),-n $(JOBS)) $(ARGS) || [ $$? = 5 ]
	$(PYTHON) -m pytest $(GPU_TESTS) -m "gpu and alone" $(ARGS) || [ $$? = 5 ]

# Every decoder of Transformers. WRITE=1 writes docs/architectures.md.
test-models: $(VENV)/.dev
	$(BIN)/python -m pytest -m models tests/models/test_every_decoder.py $(ARGS)

# Compute Transformers' outputs that tests compare with, and write them to tests/references.
# After a change in few tests: make references ARGS="tests/models --add" adds theirs.
references: $(VENV)/.dev
	rm -rf tests/references/parts
	REFERENCES=write $(BIN)/python -m pytest -n $(JOBS_HERE) --dist loadfile $(filter-out --add,$(ARGS))
	$(BIN)/python -m tests.references $(filter --add,$(ARGS))

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tools.typecheck

# man/ and completions/ are generated from the settings and the commands.
docs: $(VENV)/.dev
	$(BIN)/python -m tools.docs

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "tk needs Python 3.11 to 3.13, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    "Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Making $(VENV) ..." >&2
	@$(PYTHON) -m venv $(VENV)

INSTALLED = pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)

$(VENV)/.runtime: $(INSTALLED) | $(BIN)/python
	@echo "Installing tk and its dependencies (a few minutes the first time) ..." >&2
	@$(PIP) --editable .
	@touch $@

# It does not depend on .runtime: each installation of tk compiles the CPU kernels.
$(VENV)/.dev: $(INSTALLED) | $(BIN)/python
	@echo "Installing tk, its dependencies and the development tools (some minutes) ..." >&2
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.runtime $@

clean:
	rm -rf $(VENV) build dist *.egg-info
