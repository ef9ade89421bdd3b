# make pretrain   .venv, install, train a GPT with context parallelism on two CPU ranks, report
# make test       .venv, install with the tools, every check and every test
# make docs       the documentation as a site, build/site
# make test-fast  the quick tests, with fewer examples: two minutes on two cores
# make toolkits   compilers of the kernels, CUDA 12.4 to 13.0, into the user's cache
#
# Another interpreter or torch:  make PYTHON=python3.12 TORCH=torch==2.11.0 test

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help pretrain test test-fast check lint types floors sizes docs toolkits ci-toolkits format bench clean

PYTHON ?= python3
# Fixed, and installed first: a CPU build of this version exists; a newer one may bring gigabytes of CUDA.
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
# One stamp per choice of interpreter and torch: the second call is instant, another choice is not.
CHOICE := $(shell printf '%s' '$(PYTHON) $(TORCH)' | cksum | cut -d ' ' -f 1)
INSTALLED := $(VENV)/.installed-$(CHOICE)
INSTALLED_DEV := $(VENV)/.installed-dev-$(CHOICE)
# Stands while pip works: an environment that was interrupted half-way is made anew.
UNFINISHED := $(VENV)/.unfinished
# pip would make bytecode on one core, half of its time; `install` makes it on all.
# On a terminal it shows what it loads and how far it is; a log would only get longer.
PIP_INSTALL := $(BIN)/python -m pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check --no-compile

define install
	@if [ -e $(UNFINISHED) ] || ! $(BIN)/python -m pip --version > /dev/null 2>&1 \
		|| [ "$$($(BIN)/python -V)" != "$$($(PYTHON) -V)" ]; then \
		echo "making $(VENV)"; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); \
	fi
	@rm -f $(VENV)/.installed-*
	@touch $(UNFINISHED)
	@echo "installing $(TORCH), then $(1) (a few minutes the first time)"
	@$(PIP_INSTALL) '$(TORCH)'
	@$(PIP_INSTALL) '$(TORCH)' --editable '$(1)'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true  # some packages hold templates
	@rm -f $(UNFINISHED)
	@touch $@
endef

help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

$(INSTALLED): pyproject.toml setup.py
	$(call install,.)

$(INSTALLED_DEV): pyproject.toml setup.py
	$(call install,.[dev])
	@touch $(INSTALLED)

pretrain: $(INSTALLED)
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/pretrain_on_python_docs.sh

# The gate of the kernels reads what these compilers make; without them its tests say that they are skipped.
CI_TOOLKITS := 12.4 12.8

# Workers, each of which takes whole files in the order in which pytest has them; 0 is pytest's own process.
JOBS ?= 2
PYTEST_ARGS ?=
# Hundreds of programs that tests start would each compile our files again, where the caller's environment keeps none.
unexport PYTHONDONTWRITEBYTECODE
# Ranks are forks on the CPU, also where there are GPUs; tools/gpu_check.py is for these.
PYTEST := CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 20 $(PYTEST_ARGS)

test: $(INSTALLED_DEV)
	@$(MAKE) --no-print-directory --jobs 2 check ci-toolkits
	$(PYTEST)

ci-toolkits: $(INSTALLED_DEV)
	-@$(BIN)/python tools/fetch_toolkits.py $(CI_TOOLKITS)

# What neither starts programs nor compiles kernels.
FAST := tests/attn tests/comm tests/data tests/mask tests/plan tests/report tests/runtime tests/tools/test_plant_bugs.py

test-fast: $(INSTALLED_DEV)
	$(PYTEST) -m "not slow" --hypothesis-profile fast $(FAST)

# Strict: a broken link is an error. Search and pictures need no network.
docs: $(INSTALLED_DEV)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site is the site; open build/site/index.html in a browser"

# NVRTC of every CUDA version that the kernels are for, into the user's cache (about 320 MB).
toolkits: $(INSTALLED_DEV)
	$(BIN)/python tools/fetch_toolkits.py

# Everything that needs no test run.
check: lint types floors sizes

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED_DEV)
	MYPY_NUM_WORKERS=$(JOBS) $(BIN)/mypy

floors: $(INSTALLED_DEV)
	$(BIN)/lint-imports

sizes: $(INSTALLED_DEV)
	$(BIN)/python tools/check_sizes.py

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED_DEV)
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

# Leaves .venv and what runs have written.
clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
