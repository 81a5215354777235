# Everything happens in .venv, made here with python3 if absent. The stamps in it say what is
# installed: they are written last, so an interrupted set-up starts again, and a finished one is
# repeated only when pyproject.toml, constraints.txt or the C code change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
DEMO_READY := $(VENV)/.rowmesh-demo
TEST_READY := $(VENV)/.rowmesh-test

.DELETE_ON_ERROR:
.PHONY: help demo test nightly clean

help:
	@echo "make demo     train on two ranks of this machine (about a minute, after the set-up)"
	@echo "make test     ruff, mypy and the tests"
	@echo "make nightly  many more examples, and tests that start many processes"
	@echo "make clean    remove caches and build products; .venv stays"

demo: $(DEMO_READY)
	$(BIN)/rowmesh train --ranks 2

# The lab's tests need ip and tc; where they cannot be installed those tests are skipped.
LAB_READY := command -v tc >/dev/null || \
	(apt-get update && apt-get install --yes iproute2) >/dev/null 2>&1 || \
	echo "no iproute2, and it cannot be installed here: tests of emulated hosts are skipped"

# Two workers, each with one thread: more get in each other's way on two cores.
test: $(TEST_READY)
	@$(LAB_READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not nightly" -n 2 --dist loadfile --no-loadscope-reorder

nightly: $(TEST_READY)
	@$(LAB_READY)
	$(BIN)/pytest -m nightly

# torch goes first and under the constraint: resolved freely it may come with gigabytes of CUDA.
$(DEMO_READY): pyproject.toml setup.py constraints.txt $(wildcard src/rowmesh/native/*.[ch])
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing torch (large) and rowmesh into $(VENV)"
	@$(PIP) torch
	@$(PIP) -e '.[all]'
	@touch $@

$(TEST_READY): $(DEMO_READY)
	@echo "installing the development tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src -name '*.so' -delete
	rm -f $(DEMO_READY) $(TEST_READY)
	find src tests examples benchmarks papers -name __pycache__ -type d -prune -exec rm -rf {} +
