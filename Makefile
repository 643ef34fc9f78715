# Everything runs from .venv, which the first target that needs it creates: `make demo`, `make test`.
# Needs Python 3.11 or newer; choose one with `make PYTHON=python3.12 ...`.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
MUTANTS ?= 300
BASE ?= main
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The main promises of each room, for `make quick`. A name with brackets is one test.
QUICK := tests/linalg/test_operator.py tests/linalg/test_cholesky.py tests/linalg/test_conjugate_gradients.py \
	tests/data/test_sources.py tests/network/test_parameters.py tests/network/test_checks.py \
	tests/jacobian/layers tests/jacobian/blocks tests/jacobian/test_gram.py tests/jacobian/test_linearization.py \
	$(patsubst %,'tests/jacobian/test_zoo.py::test_products[%-auto]',mlp conv2d resnet batch_norm2d vit lstm \
		embedding tied_weights dict_inputs routing) \
	tests/probability tests/inference/evidence/test_gaussian.py tests/inference/mode/test_newton.py \
	tests/tangent/test_regressor.py tests/tangent/test_classifier.py tests/laplace/test_predictive.py \
	tests/fisher/test_comparison.py tests/fisher/test_embedding.py tests/scores tests/heads/test_attach.py \
	tests/_estimator/test_files.py tests/cli/commands/test_predict.py
# Processes of their own, and every network of the zoo.
SLOW := tests/fisher/test_embedding.py::test_two_ranks_find_what_one_finds \
	tests/heads/test_attach.py::test_networks_of_the_zoo

.PHONY: help venv demo quick test test-all lint types pytest mutate format bench docs docs-serve figures release-check matrix clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install into $(VENV) and run 'linnet demo'"
	@echo "make quick   lint, types and the main tests, in under 90 seconds on two cores once mypy has its cache"
	@echo "make test    lint, types, doctests and tests (WORKERS=$(WORKERS) processes)"
	@echo "make test-all  the same and every experiment at its smallest size"
	@echo "make docs    the documentation site, in build/site; 'make docs-serve' shows it while you write"
	@echo "make figures runs the code of the pages, and writes what it prints and draws"
	@echo "make mutate  small wrong changes in the files that differ from BASE=$(BASE): which of them no test notices"
	@echo "make release-check  build the package, check it, install it alone, and test the sdist"
	@echo "make matrix  the tests on other versions of Python and torch, each in an environment of its own"
	@echo "make lint | types | pytest | format | bench | venv | clean"

# Installed again whenever the requirements change.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "linnet needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
		     "Choose another with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing linnet into $(VENV); this takes a few minutes the first time."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

venv: $(STAMP)

demo: $(STAMP)
	$(BIN)/linnet demo

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/mypy

# One thread in each process: more would compete for the same cores. Compiled modules are kept: the tests start many
# processes, and each of them would compile linnet again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n $(WORKERS)

pytest: $(STAMP)
	$(PYTEST) -m "not slow"

# With every experiment at its smallest size, about two minutes more.
test-all: lint types
	$(PYTEST)

quick: lint types
	$(PYTEST) $(QUICK) $(SLOW:%=--deselect %)

# All of src: make mutate BASE= (any revision otherwise).
mutate: $(STAMP)
	$(BIN)/python tools/mutate.py $(if $(BASE),--base $(BASE),--all) --count $(MUTANTS) --workers $(WORKERS)

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)
	$(BIN)/python -m benchmarks passes

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# One thread, as in the tests.
figures: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m docs.tools.pages

release-check:
	$(PYTHON) tools/environments.py release

# Some of the environments: make matrix ONLY=3.13. Gigabytes where torch comes with CUDA.
matrix:
	$(PYTHON) tools/environments.py matrix $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf $(VENV) .peers .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
