# make demo   set up and train the tiny pair: Tandem RL beside its GRPO control (runs/demo/report.html)
# make test   set up and run the test suite (ARGS="-k engine -x" are passed to pytest)
# make lint   ruff and clang-format
# make wheel  build dist/*.whl
# make gpu    on a machine with an NVIDIA GPU: build, the whole suite on it, the benchmarks: bench/results/<gpu>.json
# make clean  remove what was built, .venv included

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
TORCH := torch==2.13.0
CPU_WHEELS := https://download.pytorch.org/whl/cpu
BUILD := "setuptools>=77" wheel "pybind11>=2.13" ninja numpy
LINTERS := ruff==0.17.6 clang-format==23.1.5 build
PEERS := liger-kernel==0.8.5 cut-cross-entropy==25.1.1
COMPILED := pyproject.toml setup.py $(shell find csrc -type f)
HAS_GPU := nvidia-smi -L >/dev/null 2>&1
HAS_CUDA_TORCH := $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null

.PHONY: demo test lint wheel gpu clean torch install
.DELETE_ON_ERROR:

demo: install
	$(BIN)/fastcollab demo $(ARGS)

test: install
	$(BIN)/pytest -q -m "not slow" $(ARGS)

lint: $(VENV)/.linters
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $$(find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# build/lib is removed first: setuptools would pack modules that are no longer in the source
wheel: $(VENV)/.linters
	rm -rf build/lib* build/bdist* dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . >build.log 2>&1 || { cat build.log; exit 1; }
	@rm build.log; ls dist/*.whl

gpu:
	@$(HAS_GPU) || { echo "make gpu: nvidia-smi finds no NVIDIA GPU on this machine, need one" >&2; exit 2; }
	@$(MAKE) --no-print-directory install
	$(BIN)/fastcollab env
	@$(BIN)/python -c 'import torch; torch.zeros(1, device="cuda")'
	env -u TRITON_INTERPRET $(BIN)/pytest -q $(ARGS)
	@$(PIP) install --no-deps $(PEERS) || echo "make gpu: measured without $(PEERS)" >&2
	$(BIN)/fastcollab bench all --device cuda

clean:
	rm -rf $(VENV) build dist build.log *.egg-info fastcollab/*.so .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

torch: $(VENV)/.torch
install: $(VENV)/.installed

# A GPU image brings its own torch, which fits its driver; without a GPU a CPU wheel is enough. It is looked for where
# pip is set up to look, then at pytorch.org (PyPI's wheel for Linux is a CUDA build of several GB).
$(VENV)/.torch:
	@echo "setting up $(VENV) with $(TORCH) (once)"
	@if $(HAS_GPU) && $(HAS_CUDA_TORCH); then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV) && \
	if $(HAS_GPU); then $(PIP) install $(TORCH); \
	else $(PIP) install "$(TORCH)+cpu" 2>/dev/null || $(PIP) install --extra-index-url $(CPU_WHEELS) $(TORCH); fi; fi
	@touch $@

$(VENV)/.build: $(VENV)/.torch
	@$(PIP) install $(BUILD)
	@touch $@

$(VENV)/.installed: $(VENV)/.build $(COMPILED)
	@echo "building and installing fastcollab"
	@$(PIP) install --no-build-isolation -e ".[test]"
	@touch $@

$(VENV)/.linters: $(VENV)/.installed
	@$(PIP) install $(LINTERS)
	@touch $@
