# make serve | test | check | docs | test-gpu: each sets up .venv by itself, and does nothing when nothing changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: serve test test-gpu check docs format clean

serve: $(VENV)/.runtime
	@$(BIN)/tk serve $(ARGS)

# Files of tests run side by side, in as many processes as there are cores, at most 4 (a test of the engine takes a GB or two).
# In the order of their names: those with the fewest tests would else come last, and some of them take a minute.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# On a machine with an NVIDIA GPU, in the Python that holds its torch: PYTHON=python3 make test-gpu JOBS=8
# Those that need the GPU for themselves come last, one after the other. (pytest ends with 5 where ARGS leave none.)
test-gpu:
	@$(PYTHON) -c 'import toolkit.kernels' || { \
	  echo "Install this checkout into $(PYTHON) first: $(PYTHON) -m pip install --no-deps --no-build-isolation --editable ." >&2; exit 1; }
	$(PYTHON) -m pytest -m "gpu and not alone" $(if $(JOBS),-n $(JOBS)) $(ARGS) || [ $$? = 5 ]
	$(PYTHON) -m pytest -m "gpu and alone" $(ARGS) || [ $$? = 5 ]

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tools.typecheck

# man/ and completions/, from the table of settings and the tree of commands
docs: $(VENV)/.dev
	$(BIN)/python -m tools.docs

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "tk needs Python 3.11 to 3.13, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Making $(VENV) ..." >&2
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h) | $(BIN)/python
	@echo "Installing tk and its dependencies (the first time this takes a few minutes) ..." >&2
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the development tools ..." >&2
	@$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
