# Two commands do all set-up on a fresh machine:  make demo,  make test
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
TORCHVISION ?= 0.28.0
# Triton comes with GPU builds of torch, in one release each; the tests compile kernels for GPUs with it
TRITON ?= 3.6.0
# models of the tests: golden texts are those of one release, and users may have any of 5
TRANSFORMERS ?= 5.24.0
WORKERS ?= 2
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
# a line every four seconds while a command runs that says nothing:  $(call told,what,command)
told = $(2) & pid=$$!; s=0; while kill -0 $$pid 2> /dev/null; do sleep 1; s=$$((s + 1)); \
	[ $$((s % 4)) -ne 0 ] || echo "  $(1), $$s s"; done; wait $$pid

.PHONY: demo test lint check site nightly nightly-oldest nightly-newest bench clean

# torch comes first and pinned: an unpinned torch pulls gigabytes of GPU packages
$(VENV)/.torch-$(TORCH):
	@echo "creating $(VENV) with torch $(TORCH)"
	@$(call told,creating $(VENV),$(PYTHON) -m venv $(VENV))
	@$(call told,installing torch $(TORCH),$(PIP) torch==$(TORCH))
	@touch $@

$(VENV)/.demo: $(VENV)/.torch-$(TORCH) pyproject.toml
	@echo "installing autopar and transformers"
	@$(call told,installing,$(PIP) --editable ".[hf]")
	@touch $@

# torchvision and timm are models to be traced; they live apart, because transformers will not import where it sees a
# torchvision that torch cannot load
EXTRAS := $(VENV)-extras
$(EXTRAS)/.done: $(VENV)/.torch-$(TORCH)
	$(PIP) --no-deps --target $(EXTRAS) torchvision==$(TORCHVISION) timm==1.0.31 pillow
	@touch $@

$(VENV)/.test: $(VENV)/.torch-$(TORCH) $(EXTRAS)/.done pyproject.toml Makefile
	$(PIP) --editable ".[test,hf]" transformers==$(TRANSFORMERS) "triton==$(TRITON); platform_system == 'Linux'"
	@touch $@ $(VENV)/.demo

# all that .test has, in one call of pip
$(VENV)/.dev: $(VENV)/.torch-$(TORCH) $(EXTRAS)/.done pyproject.toml Makefile
	$(PIP) --editable ".[test,hf,dev]" transformers==$(TRANSFORMERS) "triton==$(TRITON); platform_system == 'Linux'"
	@touch $@ $(VENV)/.test $(VENV)/.demo

demo: $(VENV)/.demo            ## plan a model on a 2x2 mesh, train it on four processes beside the single-device model
	@$(BIN)/python examples/demo.py

test: $(VENV)/.test            ## every test but the nightly ones
	AUTOPAR_EXTRAS=$(EXTRAS) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST)

lint: $(VENV)/.dev             ## format, lint, types, and the order of folders
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/form.py

check: lint                    ## lint, and the tests that start no processes
	$(BIN)/python -m pytest -m "not nightly and not machines"

site: $(VENV)/.test            ## the pages as a site, in the folder site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet   # pyproject.toml has MkDocs below 2

nightly: $(VENV)/.test         ## the long tests
	AUTOPAR_EXTRAS=$(EXTRAS) $(BIN)/python -m pytest -m nightly --timeout 3600 --numprocesses $(WORKERS) --dist worksteal $(PYTEST)
	PYTHONPATH=. $(BIN)/python -m benchmarks.pairs

nightly-oldest:                ## the tests on the oldest torch we support; the index may have a GPU build only (gigabytes)
	$(MAKE) test TORCH=2.11.0 TORCHVISION=0.26.0 VENV=.venv-2.11

nightly-newest:                ## the tests on the newest torch we support; the index may have a GPU build only (gigabytes)
	$(MAKE) test TORCH=2.14.1 TORCHVISION=0.29.1 TRITON=3.8.0 VENV=.venv-2.14

bench: $(VENV)/.test           ## the benchmarks; each prints a table
	@for b in $(wildcard benchmarks/*.py); do PYTHONPATH=. AUTOPAR_EXTRAS=$(EXTRAS) $(BIN)/python $$b || exit 1; done

clean:
	rm -rf $(VENV) $(EXTRAS) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
