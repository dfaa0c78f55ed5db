# Both commands set themselves up: a bare clone, Python >= 3.10 and pip are enough.
# worksteal: some tests shrink a case for half a minute, and must not queue behind one another.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help setup verify test lint bench traces peers clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(VENV)/.ready  ## the virtual environment, pinned by constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' \
		--config-settings editable_mode=compat  # else the folder above the clone hides the package
	@touch $@

verify: $(VENV)/.ready  ## the laws, on every CPU backend
	$(BIN)/python -m pytest -n auto --dist worksteal properties/

test: lint  ## lint, types, import layers, then our own tests
	$(BIN)/python -m pytest -n auto --dist worksteal tests/

lint: $(VENV)/.ready  ## ruff, mypy, import-linter
	BIN=$(BIN) ci/lint.sh

bench: $(VENV)/.ready  ## the CPU figures that the README quotes
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only

traces:  ## the recorded traces against the real model (own environment; 93 MB of download)
	PYTHON=$(PYTHON) bash ci/traces.sh

peers:  ## transformers' sampling and warpers before the laws, bitmasks against xgrammar's (own environment)
	PYTHON=$(PYTHON) bash ci/peers.sh

clean:  ## forget the environment and the caches
	rm -rf $(VENV) .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .treeconv
