# Everything runs in .venv, which is made on demand and rebuilt when pyproject.toml or constraints.txt change.
#   PYTHON=python3.12   which Python makes the environment (>= 3.11)
#   TORCH_ARGS="..."    extra arguments of pip for torch alone, such as the index of its CPU-only builds
#   RUN=faces           what `make audit` audits: a bundled name or a run file
#   ARGS="-k noise"     extra arguments of pytest
#   JOBS=2              processes of pytest
PYTHON ?= python3
TORCH_ARGS ?=
RUN ?= faces
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
QUIET := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYRIGHT_PYTHON_IGNORE_WARNINGS=1
PYTEST := $(QUIET) $(BIN)/python -m pytest -q

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help audit test test-processes papers-quick lint format docs browser clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

audit: $(VENV)/.core ## attack bundled images (or RUN=...) and say where the report is
	@$(QUIET) $(BIN)/gradveil audit $(RUN)

test: $(VENV)/.dev ## run the tests and the examples in docstrings
	$(PYTEST) -n $(JOBS) -m "not processes" $(ARGS)

# Only files with such tests are read, unless ARGS names others. The tests of a file run one after the other.
test-processes: $(VENV)/.dev browser ## run the tests that start other processes (a browser, kills)
	@$(PYTEST) -n $(JOBS) --dist loadfile -m processes \
	  -o testpaths="$$(grep -rl 'mark\.processes' tests --include='test_*.py' | sort | tr '\n' ' ')" $(ARGS)

papers-quick: $(VENV)/.hub ## run every table of the five papers at quick scale (up to an hour)
	@$(QUIET) $(BIN)/python -m benchmarks.papers_quick $(ARGS)

lint: $(VENV)/.dev ## check style, formatting and types
	@failed=0; \
	for check in "ruff check ." "ruff format --check ." "pyright"; do \
	  echo "$$check"; $(QUIET) $(BIN)/$$check || failed=1; \
	done; exit $$failed

format: $(VENV)/.dev ## format the code and apply the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Documentation: site/index.html"

clean: ## remove the environment, caches and the built documentation; runs/ stays
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .hypothesis src/gradveil.egg-info
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# The browser tests drive Debian's Chromium; elsewhere any chromium and chromedriver on the PATH will do.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" -eq 0 ]; then \
	  echo "Installing Debian's chromium and chromium-driver"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get -qq update </dev/null && \
	  apt-get -qq install -y --no-install-recommends chromium chromium-driver </dev/null >/dev/null; \
	else \
	  echo "make test-processes needs 'chromium' and 'chromedriver' on the PATH." >&2; \
	  echo "On Debian or Ubuntu: sudo apt-get install chromium chromium-driver" >&2; \
	  exit 1; \
	fi

# torch goes first and pinned: whatever else asks for an unpinned torch may bring gigabytes of CUDA libraries along.
$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Gradveil needs Python 3.11 or newer; '$(PYTHON)' is missing or older." >&2; \
	  echo "Choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Making the environment in $(VENV) (once; a minute or two)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "Making $(VENV) failed; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PIP) $(TORCH_ARGS) torch
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.hub: $(VENV)/.core
	@$(PIP) -e '.[hub]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	@$(PIP) -e '.[docs]'
	@touch $@
