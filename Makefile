# Two commands: `make demo` and `make test`. Both set up .venv first, both may be run again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE := $(VENV)/engine
PIP := $(BIN)/pip --disable-pip-version-check
# The engine's packages, the C++ build and the lint run side by side.
MAKEFLAGS += --jobs=3
# Byte code is left to the first import: most of what is installed is never imported. But an environment that forbids to
# write it (many container images do) would make every process compile torch and SGLang again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(shell find native -type f -not -name '*.pyc' -not -name '*.md')

.PHONY: demo test check setup clean
.DEFAULT_GOAL := help

.PHONY: help
help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: setup  ## SmolLM2-135M gets a draft: extract, train, export, serve with real SGLang, measure (about 15 minutes on 2 cores)
	$(BIN)/python examples/demo.py

test: setup $(VENV)/.extras check  ## lint, types and all tests, a real SGLang server on the CPU included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadscope --no-loadscope-reorder

check: $(VENV)/.python  ## lint and types only
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.python $(VENV)/.engine $(VENV)/.native $(VENV)/.packages  ## everything into .venv

$(VENV)/.python: requirements/dev.txt requirements/demo.txt
	@echo "== Python packages (torch 2.13.0) into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile -r requirements/dev.txt
	$(PIP) install --quiet --no-compile --no-deps -r requirements/demo.txt
	@touch $@

$(VENV)/.extras: requirements/extras.txt $(VENV)/.python
	@echo "== Ray and TensorBoard, for the tests"
	$(PIP) install --quiet --no-compile -r requirements/extras.txt
	@touch $@

# SGLang has an interpreter of its own: its torchvision wheel is a CUDA build that breaks every import of transformers
# beside a CPU torch. It sees the packages of $(VENV), editable ones
# included, through a .pth file, so torch is not installed twice.
$(VENV)/.engine: requirements/sglang-cpu.txt $(VENV)/.python
	@echo "== SGLang for the CPU into $(ENGINE)"
	test -x $(ENGINE)/bin/python || $(BIN)/python -m venv --without-pip $(ENGINE)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > "$$($(ENGINE)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/eyas-parent.pth"
	$(PIP) --python $(ENGINE)/bin/python install --quiet --no-compile --no-deps -r requirements/sglang-cpu.txt
	@touch $@

$(VENV)/.native: $(NATIVE_SOURCES) $(VENV)/.python
	@echo "== eyas-native (C++, CPU)"
	$(PIP) install --quiet --no-compile --no-deps --no-build-isolation -C cmake.define.EYAS_CUDA=OFF -e .
	@touch $@

$(VENV)/.packages: $(wildcard packages/*/pyproject.toml) $(VENV)/.native
	@echo "== eyas-contract, eyas-extract, eyas-draft, eyas-serve"
	$(PIP) install --quiet --no-compile --no-deps --no-build-isolation $(foreach p,contract extract draft serve,-e packages/$(p))
	@touch $@

clean:  ## remove what was built and run, .venv included
	rm -rf $(VENV) build dist runs
