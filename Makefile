# Two commands for a stranger: `make train` and `make test`. Both set up .venv first, once.
.DELETE_ON_ERROR:
.PHONY: help setup train ui test equivalence screenshots test-containers faults faults-ci guards cluster-test lint lock clean

PYTHON ?= python3
BIN := .venv/bin
# every GPU there is, else two processes on the CPU
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
NPROC ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
ARGS ?=
# a lock file with hashes, for every Python from 3.11 on, and without the address of any index
COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
  --no-emit-index-url --no-emit-find-links --quiet

help:
	@echo 'make train   set up, make the digits, train them on $(NPROC) processes (NPROC=N, ARGS="key=value ...")'
	@echo 'make ui      look at the runs in MLflow, http://127.0.0.1:5000'
	@echo 'make test    set up and run all tests'
	@echo 'make faults-ci         the fault matrix, in 20 minutes; make faults: for hours, goes on where it was broken off'
	@echo 'make equivalence       docs/equivalence.md anew: the same job started and spread in every way'
	@echo 'make screenshots       docs/images anew: a run on two nodes in MLflow, by Chromium'
	@echo 'make test-containers   build the images and test them, with a Docker engine'
	@echo 'make cluster-test      train and hurt the digits on a cluster (KUBECONFIG, IMAGE, MLFLOW_IMAGE, RENDER)'
	@echo 'make lint    ruff and mypy'
	@echo 'make setup   the environment alone, in .venv'
	@echo 'make lock    write the lock files anew from pyproject.toml (wants uv)'

setup: .venv/ready

.venv/ready: requirements-dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

train: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m pipeline train digits $(ARGS)
	@echo
	@echo 'the run is in runs/digits; look at it with: make ui'

ui: setup
	@echo 'http://127.0.0.1:5000 (stop with Ctrl-C)'
	MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false MLFLOW_DISABLE_TELEMETRY=true $(BIN)/mlflow server --host 127.0.0.1 --port 5000 --workers 1 --backend-store-uri sqlite:///runs/mlflow.db \
	  --artifacts-destination runs/mlartifacts

TWO = --numprocesses 2 --dist loadfile --no-loadscope-reorder
test: setup
	$(BIN)/python -m pytest $(TWO) $(ARGS)

# the same job started and spread in every way, in some minutes
equivalence: setup
	$(BIN)/python tests/equivalence.py docs/equivalence.md

# what docs/what-you-see.md shows; wants Chromium
screenshots: setup
	$(BIN)/python tests/screenshots.py docs/images

FAULTS = $(BIN)/python -m pytest --ledger=build/faults.jsonl --report=docs/faults.md

# two at a time: a start is mostly one core's work
faults-ci: setup
	$(FAULTS) $(TWO) --faults ci -m fault $(ARGS)

# one at a time, so that seconds mean something; the results of each test are kept in build/faults.jsonl: what has passed on
# the same code is not run again
faults: setup
	$(FAULTS) --faults long -m fault $(ARGS); first=$$?; \
	if docker version >/dev/null 2>&1; then $(FAULTS) --engine --faults long -m fault $(ARGS); fi && exit $$first

# the six guards of what a run shows to nobody: taken out one by one, a test must fail
guards: setup
	$(BIN)/python tests/faults/guards.py

# BASE_IMAGE names another base than that of the Dockerfile
test-containers: setup
	$(BIN)/python -m pytest --engine $(ARGS)

# on a real cluster, with kubectl: KUBECONFIG, IMAGE, MLFLOW_IMAGE, RENDER="--cpu --single-node"
cluster-test: setup
	$(BIN)/python tests/on_cluster.py --image "$(IMAGE)" --mlflow-image "$(MLFLOW_IMAGE)" --render "$(RENDER)"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock:
	$(COMPILE) pyproject.toml --upgrade --output-file requirements.lock
	$(COMPILE) pyproject.toml --extra dev --constraint requirements.lock --output-file requirements-dev.lock
	printf 'setuptools>=77\n' | $(COMPILE) - --constraint requirements.lock --output-file requirements-build.lock
	printf 'boto3\nmlflow[auth]\npsycopg2-binary\n' | $(COMPILE) - --constraint requirements.lock --output-file requirements-mlflow.lock

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
