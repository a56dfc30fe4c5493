# Commands on a fresh machine: `make run`, `make tour`, `make test`. Everything goes into .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
ARGS ?=

# every stage of the bundled model that ends by itself, with doctor's measurements short
TOUR := 'stages=[download,repack,spot_check,residents,doctor,plan,verify,bench,chat]' \
    doctor.each_s=0.2 doctor.sustained_s=5 'prompt=Tell me a short story about a fox.'

.PHONY: run tour test lint clean

run: $(VENV)/.run
	@exec $(VENV)/bin/python run.py $(ARGS)

tour: $(VENV)/.run
	@$(VENV)/bin/python run.py $(TOUR) $(ARGS)

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
