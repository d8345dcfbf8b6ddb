# `make` alone lists the targets. Everything runs from .venv, which `make setup` makes from the pins in requirements/.

PYTHON ?= python3
BIN := .venv/bin
GO ?= $(or $(shell command -v go),/usr/local/go/bin/go)
# Where make runs several targets at once, their output would interleave beyond reading. Linters are told to keep it apart.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif
# A third of what a node takes to start is to compile it, where that is not kept; and as much of what pytest takes.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## create or update .venv from the pins; does nothing when it is current
	@$(PYTHON) tools/setup_venv.py

.PHONY: serve
serve: ## serve from the checkout, with WORKERS (1) processes; a new rule book is seeded from examples/rules.yaml
	@$(PYTHON) tools/setup_venv.py $(if $(filter-out 1,$(WORKERS)),--to-serve-with-workers,--to-serve)
	@$(BIN)/ratelimitd serve --rules-file examples/rules.yaml $(if $(WORKERS),--workers $(WORKERS))

# The tests of whole clusters, of the simulated ledger and of generated input are `deep`, and others that take seconds; a
# slice of each stays in `test`.
QUICK := not system and not long and not deep

# Does nothing when it is current: it is pinned and verified by tools/helm/go.sum. The Go caches are the user's own.
.PHONY: helm
helm: setup ## build Helm, which renders the chart, into .venv/go; needs Go 1.26
	@$(GO) version >/dev/null || { echo "helm: missing Go 1.26: install it, or name it: make GO=/path/to/go" >&2; exit 1; }
	@$(GO) build -C tools/helm -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" -o $(CURDIR)/.venv/go/ \
		helm.sh/helm/v4/cmd/helm

.PHONY: test
test: setup ## run the tests
	@$(BIN)/python -m pytest -q -n 2 -m "$(QUICK)"

# The tests of the packages that must be covered, which are those without I/O. Tracing makes a test two times slower.
PURE := $(addprefix tests/unit/,algorithms backtest buckets cluster http2 ledger limiter rules wire)

.PHONY: coverage
coverage: setup ## run the tests: the pure packages must be covered to every line and branch, the rest in asyncio's debug mode
	@rm -f .coverage .coverage.*
	@COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
		$(BIN)/python -m pytest -q -n 2 -m "$(QUICK)" $(PURE)
	@$(BIN)/coverage combine --quiet && $(BIN)/coverage report --skip-covered
	@$(BIN)/python -m pytest -q -n 2 -o asyncio_debug=true -m "$(QUICK)" $(PURE:%=--ignore %)

# Tests of processes wait for them for a third of their time, so one more runs than there are cores.
.PHONY: test-deep
test-deep: setup ## run the tests of real clusters, the simulated ledger and generated input
	@$(BIN)/python -m pytest -q -n 3 -m "deep and not long"

.PHONY: system-packages
system-packages: setup helm ## build, and unpack or install, what the end-to-end tests need
	@tools/system_packages.sh

.PHONY: test-system
test-system: system-packages ## run the end-to-end tests of the installed command
	@$(BIN)/python -m pytest -q -n 3 -m "system and not long"

.PHONY: test-pythons
test-pythons: setup ## run the tests of the core from the wheels with each newer Python that is at hand
	@$(BIN)/python tools/other_pythons.py

.PHONY: test-long
test-long: system-packages ## run the tests that take minutes
	@$(BIN)/python -m pytest -q -m long

.PHONY: soak
soak: setup ## of test-long the node under load alone, for SOAK_S seconds (600), with its figures
	@$(BIN)/python -m pytest -q -s -m long tests/system/test_soak.py

.PHONY: mutants
mutants: setup ## put SAMPLE (800) small faults into the code, one at a time, and see that the tests notice each
	@$(BIN)/python tools/mutants.py --sample $(or $(SAMPLE),800)

# One target for each check, so that one that fails does not hide the others.
LINTS := mypy format ruff pyright imports spelling contract generated pins docs

.PHONY: lint $(LINTS:%=lint-%)
lint: setup ## check style, types, layers, spelling, the contract, the generated code and the docs
	@$(MAKE) --keep-going --no-print-directory --jobs 2 --output-sync=target $(LINTS:%=lint-%)

lint-format:
	@$(BIN)/ruff format --check --output-format concise .

lint-ruff:
	@$(BIN)/ruff check --output-format concise .

lint-mypy:
	@$(BIN)/mypy

lint-pyright:
	@$(BIN)/basedpyright

lint-imports:
	@$(BIN)/lint-imports --no-logo

lint-spelling:
	@$(BIN)/codespell

lint-contract:
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against proto/baseline.txtpb

lint-generated:
	@$(BIN)/python tools/generated_code.py --check
	@$(BIN)/python -m tools.reference_pages --check

lint-pins:
	@$(BIN)/python tools/check_pins.py

# Every link and anchor of the site leads somewhere, or it is not built.
lint-docs:
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir .scratch/site && echo "docs: the site builds"

.PHONY: format
format: setup ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

.PHONY: recording
recording: setup ## record `ratelimitd demo` for a minute, for the README
	@$(BIN)/python tools/record_demo.py docs/pictures/demo.svg

.PHONY: bench
bench: setup ## measure checks per second and latencies
	@$(BIN)/python -m bench

.PHONY: dist
dist: setup ## build both distributions of the last commit, and their list of materials, into dist/
	@$(BIN)/python tools/dist.py

.PHONY: docs
docs: setup ## write the RPC reference anew, and build the documentation site into site/
	@$(BIN)/python -m tools.reference_pages --write
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

.PHONY: proto
proto: setup ## write the generated code anew from proto/
	@$(BIN)/python tools/generated_code.py --write

.PHONY: manifests
manifests: helm ## write deploy/kubernetes anew from the chart
	@$(BIN)/python tools/kubernetes_manifests.py --write

.PHONY: proto-baseline
proto-baseline: setup ## at a release: make today's contract the one that may not be broken
	@$(BIN)/buf build --exclude-source-info -o proto/baseline.txtpb

# uv is told neither an index nor a directory of wheels, so that none of their addresses can end up in the pins.
.PHONY: pins
pins: setup ## compile requirements/*.in anew; UPGRADE=--upgrade takes the newest versions
	@for name in build base dev workers; do \
		$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
			$(UPGRADE) requirements/$$name.in --output-file requirements/$$name.txt || exit 1; \
	done

.PHONY: clean
clean: ## remove .venv, caches and what a node left in the checkout
	@rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage* \
		ratelimitd.db* ratelimitd-state site dist .scratch
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
