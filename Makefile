# Two commands: make demo, make test. Everything else is for those who work on the package.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OUT    ?= layerbudget-demo
JOBS   ?= 2

# Reusing freed memory instead of returning it to the system makes torch on a CPU 1.2-1.8 times faster (glibc only).
export MALLOC_MMAP_THRESHOLD_ = 8589934592
export MALLOC_TRIM_THRESHOLD_ = 17179869184
export TOKENIZERS_PARALLELISM = false
export OMP_WAIT_POLICY = PASSIVE
# Compiled modules are kept, outside the tree: tests start many interpreters, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX = $(CURDIR)/$(VENV)/pycache

.PHONY: demo test coverage test-slow test-avx2 install bench lint docs clean

demo: install
	$(BIN)/layerbudget demo --out $(OUT) --overwrite

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

# The suite once more with its coverage: tests that start a process of their own are not counted.
coverage: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --cov=layerbudget --cov-report=term:skip-covered

test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m slow

# What leans most on the processor (recorded numbers, masks, roundings), on the kernels of one without AVX-512 and AMX.
test-avx2: install
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
		-n $(JOBS) --dist loadfile tests/golden tests/compressors tests/decisions/sparsity

install: $(STAMP)

# torch first and by its exact version: a CPU wheel that is at hand is then kept, and nothing pulls CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[peft,eval,report,dev]"
	touch $(STAMP)

bench: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.programs solvers
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scores cost
	@echo "benchmarks that compare with peers take their checkouts as arguments: see benchmarks/README.md"

lint: install
	$(BIN)/ruff check src paper tests benchmarks scripts examples
	$(BIN)/ruff format --check src paper tests benchmarks scripts examples
	$(BIN)/mypy

docs: install
	rm -rf docs/_build  # of modules that are gone, and of pages whose warnings were said once
	$(BIN)/sphinx-build -W --keep-going -q -b html -d docs/_build/doctrees docs site

clean:
	rm -rf $(VENV) $(OUT) build dist src/*.egg-info
