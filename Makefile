# Everything runs from a fresh checkout: `make test` and `make demo` set up .venv by themselves, and do it again only
# when pyproject.toml or constraints.txt change. Needs python3 (3.11 or newer) and make.
#
# Commands come from .venv/bin, never as `python -m ...` or `python -c ...`: those put the repository root on sys.path,
# where our folders kernels/ and analysis/ would hide packages of the same name.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ZOO_BIN := .venv-zoo/bin
ZOO_READY := .venv-zoo/.ready
DOCS_READY := .venv/.docs-ready
VERSION ?= 2.11.0
TORCH_BIN := .venv-torch-$(VERSION)/bin
TORCH_READY := .venv-torch-$(VERSION)/.ready
# One more than there are cores: some tests wait for processes that they have started.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
INPUTS := pyproject.toml constraints.txt
# Each process of the tests would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test static lint types format unit package bench floors fuzz test-slow test-oracles test-zoo test-recipes test-torch test-kernels docs docs-serve release-check clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv with everything the other targets need

$(READY): $(INPUTS)
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "sft needs Python 3.11 or newer, found " + sys.version.split()[0] + "; call make PYTHON=...")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,demo]'
	touch $@

demo: $(READY) ## Train on a slide inside a byte budget; the figures and tables go to out/demo
	$(BIN)/python examples/slide_classification/main.py --out out/demo

test: lint ## Lint, types, tests, and the packaging check
	$(MAKE) --jobs 2 unit static

# Next to the tests: one process at a time.
static: types
	$(MAKE) package

lint: $(READY) ## Style, formatting, the layers, and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

types: $(READY) ## mypy, strict
	$(BIN)/mypy

unit: $(READY) ## The tests and doctests alone, on all cores (or WORKERS processes)
	SFT_HYPOTHESIS_PROFILE=$${SFT_HYPOTHESIS_PROFILE:-ci} $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=25 -m "not slow"

test-slow: $(READY) ## What `make test` has no time for: large networks, many cases, twice as many random examples
	SFT_HYPOTHESIS_PROFILE=$${SFT_HYPOTHESIS_PROFILE:-ci} $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=25 -m slow
	SFT_HYPOTHESIS_PROFILE=$${SFT_HYPOTHESIS_PROFILE:-quick} $(BIN)/pytest -n $(WORKERS) --dist worksteal -m "hypothesis and not slow"

package: $(READY) ## Build the sdist and from it the wheel, and import the wheel elsewhere
	$(BIN)/python tests/packaging/check_wheel.py

format: $(READY) ## Rewrite the code in the house format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

fuzz: $(READY) ## Random networks against eager PyTorch, for MINUTES (10) minutes
	PYTHONPATH=$(CURDIR) $(BIN)/python -P tests/fuzz.py --minutes $(or $(MINUTES),10)

floors: $(READY) ## Memory floors of small networks against the committed table (tests/floors)
	$(BIN)/python -P tests/floors/__main__.py

bench: $(READY) ## Run the benchmarks
	$(BIN)/python benchmarks/run.py

$(ZOO_READY): $(INPUTS)
	$(PYTHON) -m venv --clear .venv-zoo
	$(ZOO_BIN)/pip install --quiet -c constraints.txt -e '.[test,demo,zoo,frameworks,peft]'
	touch $@

test-oracles: $(READY) ## Solvers against brute force on 10 (or FACTOR=100) times the instances; traces of hundreds of random plans
	SFT_ORACLE_FACTOR=$(or $(FACTOR),10) $(BIN)/pytest -n auto --dist worksteal --durations=10 tests/solvers/test_acg.py tests/solvers/test_joint.py \
		tests/solvers/test_offload_solvers.py tests/solvers/test_recompute_solvers.py
	SFT_HYPOTHESIS_PROFILE=default $(BIN)/pytest -n auto --durations=10 tests/runtime/test_moves_recompute.py \
		tests/runtime/test_offload.py tests/torch_runtime/test_streamed_cuts.py \
		-k "test_any_"

test-zoo: $(ZOO_READY) ## Models of torchvision, timm and MONAI against eager PyTorch, and their memory floors, in an environment of their own (hours)
	$(ZOO_BIN)/pytest tests/exactness/networks/test_bag_encoders.py -k timm
	$(ZOO_BIN)/python -P tests/zoo/__main__.py
	$(ZOO_BIN)/python -P tests/floors/__main__.py --set zoo

test-recipes: $(ZOO_READY) ## Recipes with the libraries that they are for, in the environment of the zoo
	$(ZOO_BIN)/pytest tests/examples/test_recipe_scripts.py tests/public_cases

$(TORCH_READY): $(INPUTS)
	$(PYTHON) -m venv --clear .venv-torch-$(VERSION)
	sed '/^torch==/d; /^setuptools==/d' constraints.txt > .venv-torch-$(VERSION)/constraints.txt
	$(TORCH_BIN)/pip install --quiet -c .venv-torch-$(VERSION)/constraints.txt torch==$(VERSION) 'setuptools>=77' -e '.[test,demo]'
	touch $@

test-torch: $(TORCH_READY) ## The tests with torch VERSION (2.11.0) and the Triton that it brings, in an environment of their own (4 GB)
	SFT_HYPOTHESIS_PROFILE=$${SFT_HYPOTHESIS_PROFILE:-ci} $(TORCH_BIN)/pytest -n $(WORKERS) --dist worksteal --durations=25 -m "not slow"

test-kernels: $(READY) ## Compile every kernel in every precision for every target, ahead of time
	SFT_KERNEL_SWEEP=1 $(BIN)/pytest -k compiles_ahead_of_time tests/kernels

$(DOCS_READY): $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_READY) ## Build the documentation site into out/site; links and reference are checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release-check: $(READY) ## Check a release: sdist, wheel, metadata, README, installation of each extra in a clean environment
	-$(BIN)/pip install --quiet -c constraints.txt -e '.[release]'
	PYTHONPATH=$(CURDIR) $(BIN)/python -P tests/packaging/release_check.py $(OPTIONS)

docs-serve: $(DOCS_READY) ## Show the documentation site at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean: ## Remove everything that make made
	rm -rf .venv .venv-zoo .venv-torch-* build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
