# The two commands of the README are `make run` and `make test`. Both set up what they need first,
# and both are quick when nothing has changed since. Variables to override, such as `make run TORCH_INDEX=...`:

VENV ?= .venv
# The first Python of 3.11 or newer that can make a virtual environment.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
# Which torch to install, unless the virtual environment has one already. Empty: none.
TORCH ?= torch==2.13.0
# Where to find it besides pip's own index, such as https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# What `make run` runs, and further arguments for it: `make run ARGS="stop.wall_s=60"`.
CONFIG ?= examples/webshop.yaml
ARGS ?=
# Which benchmarks `make bench` runs; all when empty.
BENCH ?=
WHEELHOUSE ?= .wheelhouse
# How many processes `make test` runs tests in.
JOBS ?= 2

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Not compiling is half the time of installing torch; what is imported is compiled when it is.
INSTALL := $(PIP) install -q --no-compile
RUN_STAMP := $(VENV)/.set-up-to-run
DEV_STAMP := $(VENV)/.set-up-to-test
BENCH_STAMP := $(VENV)/.set-up-to-bench
# The packages that adapters are for pin what others need newer: they have an environment of their own.
ADAPTERS_VENV ?= .venv-adapters
ADAPTERS_PY := $(ADAPTERS_VENV)/bin/python
ADAPTERS_STAMP := $(ADAPTERS_VENV)/.set-up
# verifiers pins an mcp that the others' packages do not take.
VERIFIERS_VENV ?= .venv-verifiers
VERIFIERS_PY := $(VERIFIERS_VENV)/bin/python
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.set-up
# SGLang wants a torch and a transformers of its own choice. It is started as a server, never imported.
SGLANG ?= sglang==0.5.23
SGLANG_VENV ?= .venv-sglang
SGLANG_PY := $(SGLANG_VENV)/bin/python
SGLANG_STAMP := $(SGLANG_VENV)/.set-up

# Agent programs from PyPI, which boxes read: they cannot compile what is not.
AGENTS_VENV ?= .venv-agents
AGENTS_STAMP := $(AGENTS_VENV)/.set-up

# TRL and verl, whose losses ours are compared with; verl's own requirements want a GPU.
PEERS_VENV ?= .venv-peers
PEERS_PY := $(PEERS_VENV)/bin/python
PEERS_STAMP := $(PEERS_VENV)/.set-up

.DEFAULT_GOAL := help
.PHONY: agents help setup run test unit check docs bench adapters peers verifiers test-sglang wheelhouse

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(RUN_STAMP) ## Set up what running needs.

run: $(RUN_STAMP) ## Run the main job: an agent learns to shop.
	$(VENV)/bin/rollart run $(CONFIG) $(ARGS)

test: $(DEV_STAMP) $(WHEELHOUSE)/.complete ## Run the tests (not the slow ones).
	$(PY) -m pytest -p xdist -n $(JOBS) --dist loadfile $(ARGS)

unit: $(DEV_STAMP) ## Run the unit tests only: seconds.
	$(PY) -m pytest -q tests/unit $(ARGS)

check: $(DEV_STAMP) ## Lint, format and type checks.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(DEV_STAMP) ## Check that the documentation says what the code does.
	$(PY) -m pytest tests/unit/test_docs*.py tests/integration/test_docs*.py

bench: $(BENCH_STAMP) ## Run the benchmarks, ours beside a peer's.
	@for name in $(or $(BENCH),$$($(VENV)/bin/rollart bench)); do \
		$(VENV)/bin/rollart bench $$name || [ $$? -eq 77 ] || exit 1; done

adapters: $(ADAPTERS_STAMP) $(DEV_STAMP) ## Run the tests of the adapters on the packages they are for.
	$(ADAPTERS_PY) -m pytest -m adapters $(ARGS) tests/adapters
	$(PY) -m pytest -m adapters $(ARGS) tests/adapters/test_real_runs.py

peers: $(PEERS_STAMP) ## Compare the algorithms with those of TRL and verl.
	$(PEERS_PY) -m pytest -m peers $(ARGS) tests/peers

test-sglang: $(SGLANG_STAMP) $(DEV_STAMP) ## Run the tests on real SGLang servers, on the CPU.
	$(PY) -m pytest -m sglang $(ARGS) tests/sglang_cpu

agents: $(AGENTS_STAMP) $(DEV_STAMP) ## Run the tests with agent programs from PyPI.
	AGENTS_VENV=$(AGENTS_VENV) $(PY) -m pytest -m agents $(ARGS) tests/agents

verifiers: $(VERIFIERS_STAMP) ## Run the tests of the adapter of verifiers, on the real package.
	$(VERIFIERS_PY) -m pytest -m adapters $(ARGS) tests/verifiers

wheelhouse: $(WHEELHOUSE)/.complete-to-train $(WHEELHOUSE)/sdists/.complete ## Fetch what tests install offline.

$(PY):
	@test -n "$(PYTHON)" || { echo "RollArt needs Python 3.11 or newer, with venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Where torch can be imported already, that one is kept.
$(RUN_STAMP): pyproject.toml | $(PY)
	$(if $(TORCH),$(PY) -c 'import torch' 2>/dev/null || $(INSTALL) \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)')
	$(INSTALL) -e '.[train]'
	@touch $@

# Compiled here, or a warning of a compiler about somebody else's file would fail a test.
$(DEV_STAMP): $(RUN_STAMP)
	$(INSTALL) -e '.[train,dev]'
	@$(PY) -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

$(BENCH_STAMP): $(RUN_STAMP)
	$(INSTALL) -e '.[train,bench]'
	@touch $@

$(VERIFIERS_STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "RollArt needs Python 3.11 or newer, with venv" >&2; exit 1; }
	@test -x $(VERIFIERS_PY) || $(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_PY) -m pip --disable-pip-version-check install -q -e '.[verifiers]' pytest \
		pytest-timeout hypothesis
	@touch $@

$(ADAPTERS_STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "RollArt needs Python 3.11 or newer, with venv" >&2; exit 1; }
	@test -x $(ADAPTERS_PY) || $(PYTHON) -m venv $(ADAPTERS_VENV)
	$(ADAPTERS_PY) -m pip --disable-pip-version-check install -q -e '.[adapters]' pytest \
		pytest-timeout hypothesis
	@touch $@

$(PEERS_STAMP): pyproject.toml tests/peers/requirements.txt
	@test -n "$(PYTHON)" || { echo "RollArt needs Python 3.11 or newer, with venv" >&2; exit 1; }
	@test -x $(PEERS_PY) || $(PYTHON) -m venv $(PEERS_VENV)
	$(if $(TORCH),$(PEERS_PY) -c 'import torch' 2>/dev/null || \
		$(PEERS_PY) -m pip --disable-pip-version-check install -q \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)')
	$(PEERS_PY) -m pip --disable-pip-version-check install -q -e . -r tests/peers/requirements.txt \
		pytest pytest-timeout hypothesis
	$(PEERS_PY) -m pip --disable-pip-version-check install -q --no-deps verl==0.9.1
	@touch $@

# Of sglang's own requirements only those that a CPU needs.
$(SGLANG_STAMP): tests/sglang_cpu/requirements.txt
	@test -n "$(PYTHON)" || { echo "RollArt needs Python 3.11 or newer, with venv" >&2; exit 1; }
	@test -x $(SGLANG_PY) || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PY) -m pip --disable-pip-version-check install -q -r tests/sglang_cpu/requirements.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(SGLANG_PY) -m pip --disable-pip-version-check install -q --no-deps '$(SGLANG)'
	@touch $@

# litellm needs mcp for tools, and does not say so.
$(AGENTS_STAMP): Makefile
	@test -n "$(PYTHON)" || { echo "RollArt needs Python 3.11 or newer, with venv" >&2; exit 1; }
	@test -x $(AGENTS_VENV)/bin/python || $(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python -m pip --disable-pip-version-check install -q \
		'mini-swe-agent==2.4.6' 'litellm==1.106.2' mcp openai
	@touch $@

# What a fresh virtual environment needs to install the wheel, and packages in editable form.
$(WHEELHOUSE)/.complete: pyproject.toml Makefile | $(PY)
	@rm -rf $(WHEELHOUSE) && mkdir -p $(WHEELHOUSE)
	@$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
		print(*p["project"]["dependencies"], *p["project"]["optional-dependencies"]["serverless"], \
		*p["build-system"]["requires"], "pytest", "pip", sep="\n")' \
		> $(WHEELHOUSE)/requirements.txt
	$(PIP) download -q --only-binary :all: -d $(WHEELHOUSE) -r $(WHEELHOUSE)/requirements.txt
	@touch $@

# What it needs to train as well; torch is most of it.
$(WHEELHOUSE)/.complete-to-train: $(WHEELHOUSE)/.complete
	@$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
		print(*p["project"]["optional-dependencies"]["train"], sep="\n")' \
		> $(WHEELHOUSE)/requirements-train.txt
	$(PIP) download -q --only-binary :all: -d $(WHEELHOUSE) -r $(WHEELHOUSE)/requirements-train.txt \
		$(TORCH) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@touch $@

# Packages that bring their tests: `rollart swe make` makes tasks of them.
SDISTS := inflection python-slugify
$(WHEELHOUSE)/sdists/.complete: $(WHEELHOUSE)/.complete
	@mkdir -p $(@D)
	$(PIP) download -q --only-binary :all: -d $(WHEELHOUSE) text-unidecode wheel
	$(PIP) download -q --no-deps $(SDISTS:%=--no-binary %) -d $(@D) $(SDISTS)
	@touch $@
