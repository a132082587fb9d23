# One command from a clean clone: `make demo` or `make test` set up .venv first; a second run does not.
#
# On Linux the torch of the default index is the CUDA build (gigabytes). For the CPU build:
#   make install TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
WHEELS := --only-binary :all: --constraint requirements-dev.txt

# of llama.cpp, the library alone
ENGINE_ALONE := -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF $(foreach part,TOOLS EXAMPLES TESTS SERVER,-DLLAMA_BUILD_$(part)=OFF)

# of llama.cpp, the server alone
SERVER_ALONE := -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF $(foreach part,TESTS EXAMPLES APP UI,-DLLAMA_BUILD_$(part)=OFF)

.PHONY: help install oracle llama-server peers demo test results fuzz mutants lint docs doctor-table format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     text with and without speculation, then every method measured -> demo-report/"
	@echo "make test     style, types and tests, in WORKERS=2 processes"
	@echo "make results  measures the embedded model again: the reports, tables and pictures of docs/ (an hour)"
	@echo "make install  only the set-up: .venv with pinned packages"
	@echo "make oracle   compiles llama.cpp (five minutes on two cores): the tests that compare with it run then"
	@echo "make llama-server  compiles it (ten minutes): bench --suite serve compares with it then"
	@echo "make peers    installs speculators and SpecForge: benchmarks/draft_training.py compares with them"
	@echo "make mutants  plants known bugs one at a time: a test must catch each (AREAS=engine for some)"
	@echo "make fuzz     10,000 hostile inputs of every kind, in limits of time and memory, and the server's (20 minutes)"
	@echo "make docs     the documentation site -> site/"
	@echo "make doctor-table  measures which mistakes the doctor names -> docs/doctor.md (half an hour)"
	@echo "make lint     style and types;  make format  rewrite the style"
	@echo "make clean    remove everything that was built, .venv included"

install: $(STAMP)

$(STAMP): pyproject.toml requirements-torch.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "outpace needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is not one of them:"; \
	  echo "  make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "no virtual environment could be made: on Debian, apt install python3-venv"; exit 1; }
	$(PIP) install --quiet $(WHEELS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements-torch.txt
	$(PIP) install --quiet $(WHEELS) -r requirements-dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

oracle: $(VENV)/.oracle

$(VENV)/.oracle: $(STAMP) requirements-oracle.txt
	CMAKE_ARGS="$(ENGINE_ALONE) $(CMAKE_ARGS)" $(PIP) install --quiet -r requirements-oracle.txt
	@touch $@

llama-server: $(BIN)/llama-server

$(BIN)/llama-server: $(STAMP) requirements-oracle.txt
	rm -rf build/llama.cpp && mkdir -p build/llama.cpp
	$(PIP) download --quiet --no-deps --no-binary :all: --dest build/llama.cpp $$(grep llama requirements-oracle.txt)
	tar --extract --gzip --file build/llama.cpp/*.tar.gz --directory build/llama.cpp --strip-components 1
	$(PIP) install --quiet $(WHEELS) cmake==4.4.5
	$(BIN)/cmake -S build/llama.cpp/vendor/llama.cpp -B build/llama.cpp/build -DCMAKE_BUILD_TYPE=Release $(SERVER_ALONE) $(CMAKE_ARGS)
	$(BIN)/cmake --build build/llama.cpp/build --target llama-server --parallel $$(getconf _NPROCESSORS_ONLN)
	cp build/llama.cpp/build/bin/llama-server $@ && rm -rf build/llama.cpp

peers: $(VENV)/.peers

$(VENV)/.peers: $(STAMP) requirements-peers.txt
	$(PIP) install --quiet --only-binary :all: --no-deps -r requirements-peers.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/outpace demo

test: lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --durations=15 --durations-min=1

results: $(STAMP)
	runs/results.sh

mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py $(AREAS)

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz_run.py --jobs $(WORKERS) $(FUZZ)
	HOSTILE=5000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/serve/test_hostile.py

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

doctor-table: $(STAMP)
	rm -f tests/doctor/mistake_table.json
	OMP_NUM_THREADS=1 $(BIN)/python tests/doctor/mistake_table.py --write

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) demo-report site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find outpace tests -name __pycache__ -type d -prune -exec rm -rf {} +
