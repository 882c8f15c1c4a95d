PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
REFERENCES := softmax head_norm learned_sink
STUDIES := $(REFERENCES:%=study-%)
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

.PHONY: study $(STUDIES) test lab proof lint check-code check-format check-types real-weights docs package-lowest package-newest clean

# Two at a time with half of the cores each: on two cores that takes less time, since threads wait for one
# another after every small operation. Bars of two programs would write over each other, so progress comes in lines.
study: $(INSTALLED)
	OMP_NUM_THREADS=$(shell expr \( $(CORES) + 1 \) / 2) TTY_INTERACTIVE=0 $(MAKE) --jobs 2 $(STUDIES)
	$(BIN)/sinkscope compare $(REFERENCES:%=runs/%) $(REFERENCES:%=src/sinkscope/reference/%) --out runs/reference.html --overwrite

$(STUDIES): study-%: $(INSTALLED)
	$(BIN)/sinkscope study reference:$* --out runs/$* --overwrite

# One thread a worker: torch takes every core by default, and two workers that do so fight over them.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The tests of the scripts that made the results.
lab: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal lab

proof: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m proof

lint: check-code check-format check-types

check-code: $(INSTALLED)
	$(BIN)/ruff check .

check-format: $(INSTALLED)
	$(BIN)/ruff format --check .

check-types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

real-weights: $(INSTALLED)
	$(BIN)/python -m pytest -m real_weights -rs tests/real_weights

# The site in build/site: it runs the tutorials, and opens from disk without a network.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	touch $@

# The built wheel in a fresh environment outside the checkout: with the lowest versions that pyproject.toml admits, or
# with the newest. TORCH=2.13.0 keeps a torch that is at hand.
PINS_lowest = $(shell sed -nE '/^dependencies/,/^\]/ s/^ *"([a-z0-9_-]+)>=([0-9.]+)".*/"\1==\2"/p' pyproject.toml)
package-lowest package-newest: package-%:
	rm -rf build/package-$* && $(PYTHON) -m venv build/package-$*
	build/package-$*/bin/python -m pip install build
	build/package-$*/bin/python -m build --outdir build/package-$*/dist
	build/package-$*/bin/python -m pip install $(if $(TORCH),$(filter-out "torch==%,$(PINS_$*)) torch==$(TORCH),$(PINS_$*)) build/package-$*/dist/*.whl
	cd build/package-$* && bin/sinkscope --help && bin/sinkscope trace --num-sequences 4 --out trace && bin/sinkscope models reference:softmax
	ls -l build/package-$*/dist

# The stamp is touched last, so an install that was interrupted starts again.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

# Removes the default environment only: VENV may name one that serves other projects. Results in runs/ stay.
clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	rm -f $(INSTALLED) $(VENV)/.docs
	find src tests lab benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
