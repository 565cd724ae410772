# Bartlett. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# A CPU build on most machines; the README has the line for CUDA.
TORCH ?= torch==2.13.0
STAMP := $(VENV)/.installed
# The profile that `make train` makes artifacts for on this machine.
SERVING ?= configs/serving$(shell $(PY) -c 'import torch; print("" if torch.cuda.is_available() else "_cpu")').yaml

.PHONY: help setup data train eval demo serve test test-slow check bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --upgrade 'pip>=24'
	$(PY) -m pip install --quiet $(TORCH)
	$(PY) -m pip install --quiet -e '.[train,serve,dev]'
	touch $@

setup: $(STAMP) ## make .venv, install, fetch and convert the bases (resumable; offline afterwards)
	@$(PY) -m data.bases

data: setup ## build the training files from the authored corpus and external_data/
	$(PY) -m data.build configs/data.yaml

train: setup ## train and evaluate encoder and reranker with the profile that fits this machine
	$(PY) -m training.recipe

eval: setup ## judge the artifacts that are there and apply the gate
	$(PY) -m training.recipe --from extraction_tuned

demo: setup ## start the service, feed two real conversations, ask ten questions
	$(PY) -m benchmarks.demo --config $(SERVING)

serve: setup ## serve the trained artifacts on 127.0.0.1:3000
	$(PY) -m serving.cli serve --config $(SERVING)

test: setup ## run the tests
	$(PY) -m pytest

test-slow: setup ## run the tests that need the real bases
	$(PY) -m pytest -m slow

check: setup ## lint and type-check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: setup ## run the benchmark gate
	$(PY) -m benchmarks.gate

clean: ## remove runs and built data; artifacts and bases stay
	rm -rf runs data/built build dist .pytest_cache .mypy_cache .ruff_cache
