# Every target works alone on a fresh clone: it needs Python >= 3.10 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo docs docs-examples notebooks lock release release-check results results-pages test test-all test-engines test-integration test-min lint clean help

help:
	@echo "make demo      fit and test on digits, and write a report of it"
	@echo "make test      lint, types and the fast tests"
	@echo "make test-integration  tests that train, export or serve whole models; CI runs both"
	@echo "make test-engines  Ray, Spark, MLflow and Parquet, in .venv-engines, which has no torch; needs Java 17"
	@echo "make test-all  the same with the slow tests, and all that touches Lightning once more under \`lightning\`"
	@echo "make docs      the documentation as pages, in site/"
	@echo "make results   which measurements of the pages are stale; with DATA=DIR it makes them, short ones first, and goes on"
	@echo "make docs-examples  every block of code of README and docs, and examples/*.py"
	@echo "make results-pages  tables of README and docs from docs/results"
	@echo "make notebooks  runs examples/notebooks and stores what they print and draw"
	@echo "make release-check  builds sdist and wheel, installs each in an environment of its own, runs the first commands"
	@echo "make release REPOSITORY=https://…  the same with addresses in the metadata, kept in dist/"
	@echo "make lock      versions of all that is installed here, for one job of CI"
	@echo "make test-min  the fast tests with the least versions that pyproject.toml allows, in .venv-min"

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), f"Python >= 3.10 expected, got {sys.version.split()[0]}: call make PYTHON=/path/to/newer/python"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing brainet_pl and its dependencies into .venv (torch is large: a few minutes)"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not integration" -n 2 --dist worksteal

test-integration: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "integration and not slow" -n 2 --dist worksteal

# What BatchPredictor imports, and the engines; the package itself without its dependencies, so that there is no torch.
.venv-engines/.ready: pyproject.toml
	$(PYTHON) -m venv --clear .venv-engines
	.venv-engines/bin/python -m pip install --quiet --upgrade pip
	.venv-engines/bin/python -m pip install --quiet numpy pillow 'msgspec>=0.22' onnx pytest pytest-timeout \
		'ray[data]' pyspark pyarrow onnxruntime mlflow-skinny 'pandas<3'
	touch $@

test-engines: .venv-engines/.ready
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 .venv-engines/bin/python -m pytest tests/engines --confcutdir tests/engines \
		-p no:cacheprovider --timeout 400

test-all: lint
	$(BIN)/python -m pytest
	BRAINET_LIGHTNING=lightning $(BIN)/python -m pytest $(filter-out tests/structure tests/graphs tests/network tests/benchmarks tests/fuzz,$(wildcard tests/[!_]*/)) \
		$(filter-out tests/test_readme.py tests/test_docs.py tests/test_notebooks.py,$(wildcard tests/test_*.py))  # these import pytorch_lightning

.venv-min/.ready: pyproject.toml
	$(PYTHON) -m venv --clear .venv-min
	$(PYTHON) tests/minimum.py > .venv-min/constraints.txt
	.venv-min/bin/python -m pip install --quiet --editable '.[dev]' --constraint .venv-min/constraints.txt
	touch $@

test-min: .venv-min/.ready
	cat .venv-min/constraints.txt
	OMP_NUM_THREADS=1 .venv-min/bin/python -m pytest -m "not slow" -n 2 --dist worksteal

docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

docs-examples: $(READY)
	OMP_NUM_THREADS=1 MPLBACKEND=agg $(BIN)/python -m pytest tests/test_readme.py tests/test_docs.py tests/test_examples.py -m "slow or not slow"

results: $(READY)
	$(BIN)/python benchmarks/results.py $(if $(DATA),--data "$(DATA)")

results-pages: $(READY)
	$(BIN)/python benchmarks/pages.py

notebooks: $(READY)
	$(BIN)/python benchmarks/notebooks.py

release-check: $(READY)
	$(BIN)/python -m pip install --quiet twine
	$(BIN)/python tests/release.py

release: $(READY)
	$(BIN)/python -c 'import sys; assert sys.argv[1], "expected an address: make release REPOSITORY=https://HOST/OWNER/NAME [PAGES=https://…]"' "$(REPOSITORY)"
	$(BIN)/python -m pip install --quiet twine
	$(BIN)/python tests/release.py --repository "$(REPOSITORY)" $(if $(PAGES),--pages "$(PAGES)") --out dist
	SITE_URL="$(PAGES)" $(MAKE) docs

lock: $(READY)
	$(BIN)/python tests/lock.py > .github/constraints.txt

demo: $(READY)
	$(BIN)/python examples/demo.py

clean:
	rm -rf .venv .venv-min .venv-engines build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
