# Needs Python >= 3.11 and make.  Each target installs into $(VENV) if that is out of date.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
GRU = experiments/align/grammar_gru.py
RUNS = runs/demo

.PHONY: demo test test-slow test-all lint lock clean

demo: $(VENV)/.installed
	$(BIN)/attnlab train --config=$(GRU):fixed --workdir=$(RUNS)/fixed
	$(BIN)/attnlab train --config=$(GRU) --workdir=$(RUNS)/attention
	@echo; echo 'One fixed context vector:'
	@$(BIN)/attnlab eval --workdir=$(RUNS)/fixed --split=test
	@echo; echo 'Attention:'
	@$(BIN)/attnlab eval --workdir=$(RUNS)/attention --split=test
	@echo; $(BIN)/attnlab translate --workdir=$(RUNS)/attention "the teacher's small black dog does not see the European Security Area."
	@echo; $(BIN)/python -c "from attnlab.report import page; print('both side by side:', page.write_comparison_page('$(RUNS)/report.html', ['$(RUNS)/attention', '$(RUNS)/fixed']))"

PYTEST = $(BIN)/python -m pytest --numprocesses=2

test: $(VENV)/.installed
	$(PYTEST) --dist=loadfile --no-loadscope-reorder

test-slow: $(VENV)/.installed
	$(PYTEST) --dist=worksteal -m slow

test-all: test test-slow

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

lock: $(VENV)/.installed
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra test --output-file requirements.lock setup.cfg

clean:
	rm -rf $(VENV) .cache .hypothesis .pytest_cache .ruff_cache build dist *.egg-info

$(VENV)/.installed: setup.cfg pyproject.toml requirements.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnlab needs Python >= 3.11; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[test]'
	@touch $@
