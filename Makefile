# Two commands: `make run` (an answer from a real model) and `make test`. Everything goes into .venv and the user's cache folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# pip draws a bar on a terminal; in a log it says nothing while it unpacks, for most of a minute.
PACKAGES := echo "$$(ls -d $(VENV)/lib/python*/site-packages/*.dist-info 2>/dev/null | wc -l) packages installed"
PROMPT ?= Why is the sky blue? Answer in three sentences.

.PHONY: run test lint test-slow bench clean install model

run: model
	$(BIN)/hotneuron run --chat -p "$(PROMPT)" -n 200

test: model lint
	$(BIN)/python -m pytest

test-slow: model
	$(BIN)/python -m pytest -m slow

bench: model
	$(BIN)/hotneuron bench

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@mkdir -p build/types && ln -sfn ../.. build/types/hotneuron
	$(BIN)/mypy

install: $(INSTALLED)

model: $(INSTALLED)
	@$(BIN)/hotneuron pull

# The stamp is newer than what it was made from, so a second make does not install again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hotneuron needs Python 3.11 or later; give one as: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@shell=$$$$; [ -t 1 ] || while sleep 2 && kill -0 $$shell 2>/dev/null; do $(PACKAGES); done & \
		$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
