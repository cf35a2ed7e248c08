# Needs Python >= 3.10 with venv, a package index for pip, and nothing else. Every target can be
# repeated: what is already there is left alone.
#
#   make install   .venv with the package (editable), its tests' and checks' tools
#   make demo      the embedded demo task on a small real model, on the CPU
#   make report    report/ from all runs below results/
#   make sample    runs both small models and a judge on the demo, and makes docs/sample_report/
#   make check     lint, format, types and the fast tests
#   make test      all tests, those on two small real models included
#   make clean     removes what the others made

.POSIX:

PYTHON ?= python3
VENV = .venv
MODELS = .models
RESULTS = results/demo

BIN = $(VENV)/bin
STAMP = $(VENV)/installed

all: check

# The editable install copies task_configs/ into lm_eval's task tree, so it is repeated when a
# file there changes; a folder's time changes when a file is added or removed.
install:
	@if [ -f $(STAMP) ] && \
	    [ -z "$$(find pyproject.toml constraints.txt task_configs -newer $(STAMP))" ]; then \
	  exit 0; \
	fi; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is older than Python 3.10; use: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }; \
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) cannot make a virtual environment (Debian: python3-venv)" >&2; \
	  exit 1; }; \
	echo "Installing lm_eval_hyprank and its dependencies into $(VENV) (minutes at first)"; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check \
	  -c constraints.txt -e '.[test,dev,demo]' && touch $(STAMP)

models: install
	@$(BIN)/python scripts/small_models.py smollm2 gemma3 --output $(MODELS)

# A file name as output path: else lm_eval makes a folder named after the model, and one whose
# path starts with a dot would be hidden.
demo: install
	@$(BIN)/python scripts/small_models.py smollm2 --output $(MODELS)
	@mkdir -p $(RESULTS) && touch $(RESULTS)/.started
	$(BIN)/lm_eval run --model hf \
	  --model_args pretrained=$(MODELS)/SmolLM2-135M-Instruct,dtype=float32 \
	  --tasks hyprank_demo_energy --batch_size 16 --device cpu \
	  --output_path $(RESULTS)/results.json --log_samples
	@echo
	@echo "The table's numbers, and every paper's 16 scores under each scorer:"
	@find $(RESULTS) -name '*.json*' -newer $(RESULTS)/.started | sort

RUNS = results
REPORT = report

report: install
	$(BIN)/hyprank report $(RUNS) -o $(REPORT)

sample: models
	$(BIN)/python scripts/sample_report.py $(MODELS) results/sample docs/sample_report

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

fast: install
	$(BIN)/pytest -m 'not slow'

check: lint types fast

test: models
	$(BIN)/pytest

clean:
	rm -rf $(VENV) $(MODELS) results report build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: all install models demo report sample lint types fast check test clean
