# make venv: set up .venv       make demo: what this is for, in minutes   make train: train the example
# make demo-elastic: train it while ranks are killed and come back
# make test: linters and tests  make bench: ours and every rival
# make first-hour: what the first hour on GPUs should show, row by row
# make docs: the documentation, docs/build/index.html
# make check: some of the long tests, benchmarks' quick forms, the aims   make check-all: all of both, in hours
# make check-verl: training inside verl   make check-ray: jobs on a Ray cluster
# make check-oldest: planning and training with the oldest versions that pyproject.toml allows
# make check-versions PYTHON=... PINS=...: what a release of another package may break, in an environment that is there
# PIP_ARGS goes to every pip install, e.g. PIP_ARGS="--index-url ..." for another build of torch.

PYTHON ?= python3
RANKS ?= 8
TRAIN_ARGS ?=
PIP_ARGS ?=
PINS ?=

VENV := .venv
VERL := .venv-verl
RAY := .venv-ray
OLDEST := .venv-oldest
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
USABLE := $(VENV)/.usable
# What pip does is shown: it takes minutes.
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS) --constraint constraints.txt
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
export PYTHONUNBUFFERED := 1
# Tests and tools start many processes, which are not to compile the same modules each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv demo demo-elastic train bench first-hour check check-all check-verl check-ray check-oldest check-versions docs test test-training test-jobs test-ranks test-models test-pure lint kernels clean

venv: $(STAMP)

# What users need, without what developers need besides.
$(USABLE): setup.py pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(STAMP): $(USABLE)
	$(PIP) --quiet --editable '.[dev]'
	touch $@

# Without a GPU for every rank the ranks share the CPU, one thread each.
train: $(STAMP)
	GPUS=$$(nvidia-smi --list-gpus 2>/dev/null | wc -l); \
	if [ "$$GPUS" -lt $(RANKS) ]; then export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=; fi; \
	PORT=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'); \
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_gpus $(RANKS) --master_port $$PORT \
		examples/train.py --deepspeed_config examples/ds_hydra.json $(TRAIN_ARGS)

demo: $(USABLE)
	$(BIN)/ds-hydra demo

demo-elastic: $(STAMP)
	$(BIN)/python -m tools.demo_elastic

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench_systems --curves 10 --emulate 5 \
		--json benchmarks/systems.json --plots benchmarks

first-hour: $(STAMP) kernels
	$(BIN)/python -m tools.first_hour $(if $(MINUTES),--minutes $(MINUTES))

# OMP_NUM_THREADS is left as it is: tools must work without it.
check: $(STAMP) kernels
	$(BIN)/python -m tools.check --quick

# verl asks for an older transformers than .venv has, so it has an environment of its own, above .venv. One of its
# packages brings a folder "tests", which would stand before ours.
check-verl: $(STAMP)
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) --quiet --no-deps -r tests/hosts/requirements.txt
	for SITE in $(VERL)/lib/python*/site-packages; do \
		rm -rf $$SITE/tests; \
		(cd $(VENV)/lib/python*/site-packages && pwd) > $$SITE/below.pth; \
	done
	$(VERL)/bin/python -m pytest tests/hosts/test_verl.py tests/hosts/test_verl_updates.py

# Ray brings packages of its own, of versions of its own choice; they stand above those of .venv.
check-ray: $(STAMP) kernels
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) --quiet 'ray>=2.52'
	for SITE in $(RAY)/lib/python*/site-packages; do (cd $(VENV)/lib/python*/site-packages && pwd) > $$SITE/below.pth; done
	$(RAY)/bin/python -m pytest tests/hosts/test_ray.py

# What developers need besides stands below, in .venv, among it a pandas that asks for a newer numpy. Of torch PIP_ARGS
# may choose the build: without, it is one for CUDA. States in slices, and experts of Mixtral spread as whole ones, are
# refused with the oldest transformers.
check-oldest: $(STAMP)
	$(PYTHON) -m venv $(OLDEST)
	sed -n -e '/^dependencies/,/^]/ s/^ *"\([a-z]*\)>=\([0-9.]*\).*/\1==\2/p' \
		-e 's/^hf = .*"\(accelerate\)>=\([0-9.]*\)".*/\1==\2/p' -e 's/^trl = .*"\(trl\)>=\([0-9.]*\)".*/\1==\2/p' \
		pyproject.toml > $(OLDEST)/versions.txt
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) --quiet -r $(OLDEST)/versions.txt
	for SITE in $(OLDEST)/lib/python*/site-packages; do (cd $(VENV)/lib/python*/site-packages && pwd) > $$SITE/below.pth; done
	PYTHONPATH=$(CURDIR) TORCH_EXTENSIONS_DIR=$(CURDIR)/$(OLDEST)/torch_extensions $(OLDEST)/bin/python -m pytest \
		tests/pure tests/test_private_names.py tests/gloo/test_training.py tests/gloo/test_resume.py \
		tests/gloo/test_hugging_face.py -k 'not states and not of_datasets and not spread and not (by and heads)'

# In CI for several sets of releases: .github/workflows/ci.yml. TRL 1.9 imports requests and does not ask for it.
check-versions:
	$(PYTHON) -m pip install $(PIP_ARGS) '.[hf,trl]' pytest hypothesis datasets peft tokenizers requests $(PINS)
	$(PYTHON) -m pytest tests/test_private_names.py tests/pure/test_commands.py
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/gloo/test_training.py tests/gloo/test_hugging_face.py --share 0.25 \
		-k 'not states and not spread and not (by and heads)'

check-all: $(STAMP) kernels check-verl check-ray check-oldest
	$(BIN)/python -m tools.check

docs: $(STAMP)
	$(BIN)/python -m ds_hydra.commands settings > docs/settings.md
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/build

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two at a time: tests with ranks often wait for each other, and the rest runs meanwhile. The longest begin.
test: $(STAMP)
	$(MAKE) --jobs=2 --output-sync=target lint kernels
	$(MAKE) --jobs=2 --output-sync=target test-training test-models test-jobs test-ranks test-pure

# Compiles the planner's kernels, which all tests and jobs then load from numba's cache.
kernels: $(STAMP)
	$(BIN)/python -m ds_hydra.commands warm-up

test-training test-jobs test-ranks test-models test-pure check-oldest: export OMP_NUM_THREADS := 1

test-training: $(STAMP)
	$(BIN)/python -m pytest $(wildcard tests/gloo/test_*training.py)

# Tests with ranks in two halves of about the same length.
test-jobs: $(STAMP)
	$(BIN)/python -m pytest $(wildcard tests/gloo/test_[a-l]*.py)

test-ranks: $(STAMP)
	$(BIN)/python -m pytest $(filter-out %training.py,$(wildcard tests/gloo/test_[m-z]*.py))

test-models: $(STAMP)
	$(BIN)/python -m pytest --ignore=tests/gloo --ignore=tests/pure

test-pure: $(STAMP)
	$(BIN)/python -m pytest tests/pure

clean:
	rm -rf $(VENV) $(VERL) $(RAY) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
