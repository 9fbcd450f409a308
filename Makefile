# make venv: set up .venv   make train: train the example   make test: linters and all tests
# PIP_ARGS goes to every pip install, e.g. PIP_ARGS="--index-url ..." for another build of torch.

PYTHON ?= python3
RANKS ?= 8
TRAIN_ARGS ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) --constraint constraints.txt
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
export PYTHONUNBUFFERED := 1

.PHONY: venv train test test-ranks test-rest lint clean

venv: $(STAMP)

# torch comes first: DeepSpeed's set-up looks for it.
$(STAMP): setup.py pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(PIP) torch
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

# Without a GPU for every rank the ranks share the CPU, one thread each.
train: $(STAMP)
	GPUS=$$(nvidia-smi --list-gpus 2>/dev/null | wc -l); \
	if [ "$$GPUS" -lt $(RANKS) ]; then export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=; fi; \
	PORT=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'); \
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_gpus $(RANKS) --master_port $$PORT \
		examples/train.py --deepspeed_config examples/ds_hydra.json $(TRAIN_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests with ranks often wait for each other, so the rest runs beside them.
test: lint
	$(MAKE) --jobs=2 --output-sync=target test-ranks test-rest

test-ranks test-rest: export OMP_NUM_THREADS := 1

test-ranks: $(STAMP)
	$(BIN)/python -m pytest tests/gloo

test-rest: $(STAMP)
	$(BIN)/python -m pytest --ignore=tests/gloo

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
