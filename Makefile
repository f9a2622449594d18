# What people and CI call. Needs Python 3.11+, make and a package index; everything else goes into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Faster than pip's own compiling, which keeps to one core; and it is needed where Python may not write bytecode,
# because every worker process would compile torch and transformers again.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
CONFIG ?= configs/demo.yaml
MINUTES ?= 10

.PHONY: help run test test-all test-release test-gpu test-releases overlays bench bench-quick bench-share bench-gpu soak \
	lint types unit rest format docs demo release clean
.DEFAULT_GOAL := help

help:
	@echo "make run     set up an environment and run the demo ensemble ($(CONFIG)); CONFIG= names one or several"
	@echo "make test    set up an environment and run the checks to run after every change (5 minutes)"
	@echo "make lint | types | unit    one of those checks"
	@echo "make test-all  an eighth of what make test leaves out, chosen by the commit (20 minutes): long tests, sweeps, another"
	@echo "             release of transformers, a quick benchmark; CI runs both. ENSEMBLE_TEST_SHARE=0 to 7 chooses the eighth"
	@echo "make rest | overlays | bench-share    one of those checks; overlays are the other releases"
	@echo "make test-release  all of them, before a release (two hours)"
	@echo "make test-releases  try the oldest and the newest supported releases, into docs/reference/releases.md (gigabytes, an hour)"
	@echo "make test-gpu  the checks that need a GPU, in ten minutes; PYTHON= names the Python whose torch can use it,"
	@echo "             ONLY= some of them, such as ONLY=cap,release"
	@echo "make bench   measure against other ways to do the same, into docs/reference/benchmark-tables.md (an hour)"
	@echo "make bench-quick  the same code on few rows, in two minutes; bench-gpu  on a GPU, with PYTHON= and ONLY= as above"
	@echo "make soak    kill runs at random moments for MINUTES=10, resume each until it is done, and compare the files"
	@echo "make docs    build the documentation site into site/index.html; broken links are errors"
	@echo "make format  let ruff rewrite what it can"
	@echo "make demo    train the demo models again (needs Debian's wordnet-base; about 25 minutes)"
	@echo "make release TAG=v0.1.0  build a release of the last commit into dist/, if TAG is the version"
	@echo "make clean   remove the environment and caches"

run: $(VENV)/.runtime
	$(BIN)/python -m ensemble run $(CONFIG)

# mypy takes one core for half a minute, beside tests that wait for processes now and then.
test: lint
	@$(MAKE) --no-print-directory -j 2 types unit

test-all: rest overlays bench-share

test-release: lint types $(VENV)/.dev
	$(PYTEST) --part=all --costs
	@$(BIN)/python -m tests.releases --quick
	@$(MAKE) bench-quick

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Two test processes, each of which keeps to one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

unit: $(VENV)/.dev
	$(PYTEST)

# A share of what the usual part leaves out; see tests/sampling.py.
rest: $(VENV)/.dev
	$(PYTEST) --part=rest --costs

# Another release of transformers over the torch of $(VENV): the oldest, one from the middle or the newest, by the commit.
overlays: $(VENV)/.dev
	@$(BIN)/python -m tests.releases --ci

# Environments with a Python and a torch of their own need python3.11, python3.12 and python3.13 on the PATH.
test-releases: $(VENV)/.dev
	$(BIN)/python -m tests.releases --write

# With the Python that has a torch for the GPU, which is not the one of $(VENV).
test-gpu:
	@$(PYTHON) -m tests.gpu $(if $(ONLY),--only '$(ONLY)')

bench: $(VENV)/.bench
	$(BIN)/python -m bench --write docs/reference/benchmark-tables.md

bench-quick: $(VENV)/.bench
	$(BIN)/python -m bench --quick

bench-share: $(VENV)/.bench
	$(BIN)/python -m bench --quick --share $$($(BIN)/python -m tests.sampling)

bench-gpu:
	@$(PYTHON) -m bench.gpu $(if $(ONLY),--only '$(ONLY)')

soak: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Material's notice that it has a successor is no warning of this build. With --quiet, --strict counts no warnings.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "documentation: site/index.html; with search: python3 -m http.server -d site, then http://localhost:8000"

demo: $(VENV)/.dev
	$(BIN)/python scripts/make_demo.py
	$(BIN)/python scripts/demo_small_tables.py
	$(BIN)/python scripts/train_pooled_head.py demo/models/llama demo/train.csv demo/heads/llama_mean.safetensors
	$(BIN)/python scripts/train_adapter.py

release: $(VENV)/.dev
	@$(BIN)/python scripts/release.py '$(TAG)'

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

$(VENV)/.runtime: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a minute or two, most of it PyTorch) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e .
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with the development tools (two minutes, most of it PyTorch) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.runtime $(VENV)/.docs

$(VENV)/.docs: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with the documentation tools ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.bench: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with what the benchmark measures against ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[bench]'
	@$(COMPILE)
	@touch $@ $(VENV)/.runtime
