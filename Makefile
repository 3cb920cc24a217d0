# Every target sets itself up: a virtual environment in .venv, made again only when the lock changes. uv installs it
# several times as fast as pip; pip is the fallback (an index only pip knows, no wheel for this machine). Packages are
# compiled to bytecode once, or every command would compile PyTorch where PYTHONDONTWRITEBYTECODE is set.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
hash = $(shell $(PYTHON) -c "import hashlib; print(hashlib.sha256(open('$(1)','rb').read()).hexdigest()[:12])")
PACKAGES := .venv/packages-$(call hash,requirements.lock)
READY := .venv/ready-$(call hash,pyproject.toml)

.PHONY: help demo test test-slow check bench growth guard faults audit results lessons lock clean

help:            ## what can be made
	@$(PYTHON) -c "import re; [print(f'make {t:<10}{d}') for t, d in re.findall(r'(?m)^([a-z-]+):.*?## (.*)', open('Makefile').read())]"

$(PACKAGES):
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Vitascope needs Python 3.11 or newer, this is ' + sys.version.split()[0] + '. Try: make PYTHON=python3.12')"
	@echo "Setting up .venv (once; one to five minutes, about 6 GB on Linux)"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@($(PIP) uv && $(BIN)/python -m uv pip install --quiet --compile-bytecode --python $(BIN)/python -r requirements.lock) 2>.venv/uv.log || $(PIP) -r requirements.lock
	@$(PYTHON) -c "open('$(PACKAGES)', 'w').close()"

$(READY): $(PACKAGES)
	@$(PIP) --no-deps --editable .
	@$(BIN)/python -m compileall -q src
	@$(PYTHON) -c "open('$(READY)', 'w').close()"

demo: $(READY)   ## train a small ViT on handwritten digits, score it, compare the model with timm's
	@$(BIN)/python -m vitascope demo

test: $(READY)   ## all tests but the slow ones (about 4 minutes on two cores)
	@$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY) ## the slow tests: lessons, sheets, long compilations, large models (about 3 minutes)
	@$(BIN)/python -m pytest -m slow

check: $(READY)  ## formatting, lint, types, and the direction of imports
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-cache

bench: $(READY)  ## ours beside timm, transformers, torchvision and vit-pytorch on this CPU, in one run (half an hour)
	@$(BIN)/python -m benchmarks

growth: $(READY) ## how a training step's cost grows with batch, tokens, width and depth on this CPU
	@$(BIN)/python -m benchmarks.growth

guard: $(READY)  ## has our speed beside timm's fallen below the recorded one?
	@$(BIN)/python -m benchmarks.guard

faults: $(READY) ## attack by command: kills, bit flips, full disks, wrong inputs; what is lost? (a quarter of an hour)
	@$(BIN)/python -m benchmarks.faults

audit: $(READY)  ## licences of the pinned packages, and known vulnerabilities if the package index lists them
	@$(BIN)/python -m benchmarks.audit

results: $(READY) ## README's and the docs' numbers and the model cards, from results/*.json
	@$(BIN)/python -m vitascope results README.md docs/*.md benchmarks/README.md src/vitascope/recipes/*.yaml --cards docs/cards

lessons: $(READY) ## run the lessons' pages: what they print, their pictures, their notebooks
	@$(BIN)/python docs/lessons/make.py

lock:            ## pin every package again (needs uv)
	uv pip compile --universal --python-version 3.11 --extra dev --no-header --no-annotate --upgrade --quiet pyproject.toml --output-file requirements.lock

clean:           ## remove the environment and what tests leave behind
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
