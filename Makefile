# Each target does all of its own set-up, in .venv: torch, this package, and the tools that the target needs.
# The second time there is nothing to set up. `make` alone lists the targets.

# The interpreter to begin with, and what to install for torch: any pip requirement, or the path of a wheel.
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
LINK ?=
CHECKPOINTS ?=
OFFLOAD ?=

# Three files of tests at a time: many wait for clocks and for processes to start, few for a core. The slow ones come first.
# Each process that a test starts reads the library, so it had better find it compiled.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(RUN) -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --quiet --disable-pip-version-check
TORCH_READY := $(VENV)/.torch-$(firstword $(shell printf '%s' '$(TORCH)' | cksum))

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

train: $(VENV)/.with-cli  ## train a GPT on text; options by ARGS="--stage 2 --minutes 1"
	@$(VENV)/bin/zerodp train $(ARGS)

test: $(VENV)/.with-test  ## run the tests; options of pytest by ARGS
	$(PYTEST)

check: $(VENV)/.with-dev  ## formatter, linter, type checker and tests
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy
	$(PYTEST)

bench: $(VENV)/.with-bench  ## measure beside DDP, FSDP2 and DeepSpeed; LINK=2gbit for a slow link, options by ARGS
	$(RUN) bench/run.py $(if $(LINK),--link $(LINK)) $(ARGS)
	$(if $(LINK),,$(RUN) bench/checkpoints.py $(CHECKPOINTS))
	$(if $(LINK),,$(RUN) bench/offload.py $(OFFLOAD))

checklist: $(VENV)/.with-test  ## run the proof of every claim and write docs/checklist.md; some rows by ARGS="S12 S13"
	$(RUN) bench/checklist.py $(ARGS)

clean:  ## remove the virtual environment and the tools' caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "zerodp needs Python 3.10 or newer and there is no $(PYTHON) here. Install it, or name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "zerodp needs Python 3.10 or newer and $(PYTHON) is older. Name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments. Install its venv and pip (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# A first torch of one's own choice, so that installing the package does not choose another.
$(TORCH_READY): $(VENV)/.made
	@echo "Installing $(TORCH) into $(VENV); another one by: make TORCH=..."
	@rm -f $(VENV)/.torch-*
	$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.with-%: pyproject.toml $(TORCH_READY)
	$(PIP) install --editable '.[$*]'
	@touch $@

.PHONY: help train test check bench checklist clean
.PRECIOUS: $(VENV)/.with-%
