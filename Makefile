# make demo   a whole runbook run on simulated GPU servers, healthy and broken
# make test   everything that must hold before a change lands
#
# Both make their own environment in .venv from requirements.lock: once, and again when the lock or pyproject.toml changed.

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# The checkout goes first, so that `make test` tests this checkout even with another VENV. What Python compiled is kept, whatever
# the shell around says: the tests start hundreds of processes.
RUN    := PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONDONTWRITEBYTECODE=
# More than there are cores: a test waits for the answers of its simulated machine, a process of its own, half of its time.
WORKERS ?= 4

.DEFAULT_GOAL := help
.PHONY: help env demo lab test style types notebooks unit test-vm format lock build clean

help:
	@sed -n 's/^# make/make/p' Makefile

env: $(READY)

# uv reads the lock in seconds; where it cannot be had (or reaches no index that pip reaches), pip does the same, slower.
# Nothing is resolved here: every file that is installed is named, with its hash, in the lock.
$(READY): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; say PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "make: proofbook needs Python 3.11, 3.12 or 3.13; say PYTHON=/path/to/it"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "make: installing requirements.lock into $(VENV)"
	@awk '/^[^ #]/ { keep = /^uv==/ } keep' requirements.lock > $(VENV)/uv.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(VENV)/uv.lock \
	  || echo "make: uv cannot be had; going on with pip alone"
	@{ test -x $(BIN)/uv \
	    && $(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock; } \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --editable .
	@touch $@

demo: $(READY)
	@$(RUN) proofbook demo

# make lab    JupyterLab with the runbooks, to step through one yourself
lab: $(READY)
	@$(RUN) jupyter lab --notebook-dir=runbooks $$(test "$$(id -u)" -ne 0 || echo --allow-root)

# The types and the notebooks keep one core busy each; the rest keeps all of them.
test: $(READY) style
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target types notebooks
	@$(MAKE) --no-print-directory unit

style: $(READY)
	$(RUN) ruff check
	$(RUN) ruff format --check

types: $(READY)
	$(RUN) mypy

# nbval runs the committed investigations again and compares; a kernel that died would hang it, hence the timeout.
notebooks: $(READY)
	@if ls notebooks/*.ipynb >/dev/null 2>&1; then \
	  $(RUN) pytest --nbval --nbval-cell-timeout=120 -q notebooks; \
	else echo "no notebooks yet"; fi

# Tests move to whichever worker is free; each worker has simulated machines of its own. nbval is slow to load, and not used.
unit: $(READY)
	$(RUN) pytest -p no:nbval -n $(WORKERS) --dist worksteal

# make test-vm  the same on real machines: containers with a real systemd first, then virtual machines with a real kernel.
#               Needs root on Debian, and packages that it names when they are missing.
# Boxes wait for each other's seconds, so that several are tested at once; a virtual machine needs every core. What fails is
# tried once more, and both are told: a machine on a busy runner can miss any patience.
# VM="vm and not long" leaves out the tests that take minutes each: whole experiments, and what waits for several boots.
VM ?= vm
REAL = $(RUN) PROOFBOOK_REAL=1 pytest -p no:nbval
ONCE_MORE = --last-failed --last-failed-no-failures none
test-vm: $(READY)
	$(REAL) -n 3 --dist loadfile -m box tests/real || $(REAL) -m box tests/real $(ONCE_MORE)
	$(REAL) -m "$(VM)" tests/real || $(REAL) -m "$(VM)" tests/real $(ONCE_MORE)

# make format puts the code into the one format
format: $(READY)
	$(RUN) ruff check --fix
	$(RUN) ruff format

# make lock   resolve anew after a change of pyproject.toml
lock: $(READY)
	@{ printf '# What `make` installs: every package with its hashes, for Python 3.11 to 3.13.\n# Made by `make lock` from pyproject.toml.\n'; \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev --generate-hashes \
	    --no-header pyproject.toml; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

# make build  the wheel and the source archive, in dist/
build: $(READY)
	$(BIN)/python -m hatchling build

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache
