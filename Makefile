# Two commands on a fresh machine: `make run` and `make test`. Everything goes into .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
ARGS ?=

.PHONY: run test lint clean

run: $(VENV)/.run
	@exec $(VENV)/bin/python run.py $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n auto $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "NVMoE needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
