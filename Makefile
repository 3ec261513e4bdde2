# Every target works on a fresh clone: it makes .venv with CPython 3.10 and installs what constraints.txt locks.
# Choose the interpreter with PYTHON=/path/to/python3.10; hand more arguments to a tool with ARGS="...".

VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ARGS ?=
MINUTES ?= 1

export PYTHON
# Empty is unset: without compiled files each process that a test starts compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# By environment, not by -c alone, so that it holds in pip's build environments too.
export PIP_CONSTRAINT := constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo detector-demo ocr-demo test test-slow test-long test-torch coverage bench fuzz lint format types wheel-check budget docs docs-serve notebooks lock clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

$(PY):
	@python=$$(scripts/find-python) && echo "$(VENV): $$python" && "$$python" -m venv $(VENV)

# With -I the checkout is not on pip's path, where its egg-info would pass for an installed qtrace.
$(STAMP): pyproject.toml constraints.txt | $(PY)
	@$(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' || \
		{ echo "error: $(VENV) is not CPython 3.10; remove it and run make again." >&2; exit 1; }
	$(PY) -I -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## Make .venv and install qtrace into it (done by every other target)

demo: $(STAMP) ## Quantize a small trained model end to end; writes demo-out/
	$(PY) examples/demo.py $(ARGS)

detector-demo: $(STAMP) ## Quantize a small detector in 8 and 4 bits; writes detector-demo-out/
	$(PY) -m examples.detector.demo $(ARGS)

# What rapidocr-onnxruntime brings besides (pyclipper, Shapely) moves no version of the others: constraints.txt holds them.
$(VENV)/.installed-ocr: $(STAMP)
	$(PY) -I -m pip install -c constraints.txt -e '.[ocr-demo]'
	@touch $@

ocr-demo: $(VENV)/.installed-ocr ## Quantize trained networks that read text; writes ocr-demo-out/
	$(PY) -m examples.ocr.demo $(ARGS)

test: $(STAMP) ## Run the tests, without the slow ones
	$(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) ## Run the slow tests only
	$(PY) -m pytest -m slow -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: $(STAMP) ## Run the tests that take minutes: the detector's demo, all benchmarks in short, networks beyond pairs
	$(PY) -m pytest -m long -n auto $(ARGS)

# torch is large, and its wheels of the package index bring CUDA's libraries; engines of what learns need it, and `from_torch`.
$(VENV)/.installed-torch: $(STAMP)
	$(PY) -I -m pip install -c constraints.txt -e '.[torch]'
	@touch $@

# Tests that ask for torch, and no others: the rest of these rooms runs without it in `test`.
TORCH_TESTS := tests/data/test_foreign.py tests/extras/finetune/test_torch_engine.py tests/graph/files/test_allowlist.py tests/extras/torch \
	tests/learning tests/quantizing/test_faithfulness_torch.py

test-torch: $(VENV)/.installed-torch ## Install torch and test what learns by it, and networks that come from it
	$(PY) -m pytest -n auto --cov --cov-config=tests/torch.coveragerc --cov-report=term --cov-fail-under=90 $(TORCH_TESTS) $(ARGS)

# Counting lines takes a third more time: CPython 3.10 has no cheap way.
coverage: $(STAMP) ## Run the tests without the slow ones, and fail if they reach fewer than 95 % of the lines
	$(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder --cov --cov-report=term --cov-fail-under=95 $(ARGS)

bench: $(STAMP) ## Run the benchmarks
	$(PY) -m benchmarks $(ARGS)

fuzz: $(STAMP) ## Try random recipes, files, graphs and numbers for MINUTES (1)
	$(PY) -W ignore -m tests.fuzz --minutes $(MINUTES) $(ARGS)

lint: $(STAMP) ## Check style with ruff, and that commits name what they delete
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) scripts/check_deletions.py

format: $(STAMP) ## Repair style with ruff
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

types: $(STAMP) ## Check types with mypy
	$(PY) -m mypy

budget: $(STAMP) ## Show the size of each room next to its budget; ARGS=--lower writes what is less
	$(PY) -m scripts.budget $(ARGS)

wheel-check: $(STAMP) ## Build sdist and wheel, install the wheel elsewhere, and use it there
	$(PY) scripts/check_wheel.py

docs: $(STAMP) ## Build the docs site into site/, with every warning an error
	NO_MKDOCS_2_WARNING=1 $(PY) -W ignore -m mkdocs build --strict $(ARGS)

docs-serve: $(STAMP) ## Show the docs site at http://127.0.0.1:8000 while you write
	NO_MKDOCS_2_WARNING=1 $(PY) -W ignore -m mkdocs serve --livereload $(ARGS)

notebooks: $(STAMP) ## Run the notebooks of the docs and store what they show
	$(PY) -m scripts.notebooks $(ARGS)

lock: ## Resolve pyproject.toml afresh and rewrite constraints.txt
	scripts/lock

clean: ## Remove what builds and runs leave behind
	rm -rf build dist site demo-out detector-demo-out ocr-demo-out *.egg-info .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean ## The same, and .venv
	rm -rf $(VENV) .venv-torch
