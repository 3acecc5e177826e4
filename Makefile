# Two commands: `make run` and `make test`. Both set everything up first; a second time that takes a moment.
PYTHON ?= python3
PREPARE = $(PYTHON) -m tests.prepare
BIN = .venv/bin
ARGS ?=
WORKERS ?=
MODELS ?=
# The pairs of `causeway-models pull demo:NAME`.
UP_smol = --small smollm2-135m --large qwen-05b
UP_qwen = --small qwen-05b --large qwen-15b
UPSTREAM ?=
CACHE = $(or $(CAUSEWAY_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/causeway)
RUN_vllm = --vllm $(CACHE)/vllm/vllm.json

.DEFAULT_GOAL := help
.PHONY: help setup device run demo-fleet demo-voice demo-invoice encoders test test-vllm test-clients quick check lint fuzz bench bench-llm bench-peers dist dist-check release docs site train-setup lock clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Set everything up: packages, llama.cpp, Triton, Redis, Chromium, Node.js, torch
	@$(PREPARE) test

device: ## Set up the daemon and its engine only, for a device
	@CAUSEWAY_SKIP=triton $(PREPARE) run

# `exec`: Ctrl-C and SIGTERM reach the program itself, which drains, and its exit status is ours.
run: ## Set up, then start Triton, the gateway and the edge until Ctrl-C (MODELS=smol or qwen, UPSTREAM=vllm: other models)
	$(if $(filter-out vllm,$(UPSTREAM)),$(error UPSTREAM=$(UPSTREAM) is unknown: only vllm can be set up))
	$(if $(and $(UPSTREAM),$(MODELS)),$(error UPSTREAM and MODELS both name the cloud's model: give one of them))
	@$(PREPARE) run
	@$(if $(UPSTREAM),$(PREPARE) $(UPSTREAM))
	@$(if $(MODELS),$(BIN)/causeway-models pull demo:$(MODELS) $(if $(YES),--yes))
	@exec $(BIN)/causeway-edge up $(UP_$(MODELS)) $(RUN_$(UPSTREAM)) $(ARGS)

test: ## Set up, then check and run every test, four folders at a time (WORKERS=1: one; ARGS='-k name' narrows)
	@$(PREPARE) test
	@exec $(BIN)/python -m $(if $(ARGS),pytest $(ARGS),tests $(WORKERS:%=--workers %))

test-vllm: ## Set up a real vLLM (3.4 GB and weights, asked first), then test the gateway before it; never part of `test`
	@$(PREPARE) vllm
	@$(PREPARE) test
	@$(BIN)/python -m pytest tests/vllm/check_vllm.py $(ARGS)
	@CAUSEWAY_CONFORMANCE=vllm exec $(BIN)/python -m pytest tests/conformance $(ARGS)

test-clients: ## Install Python's agent frameworks and MCP's suite (570 MB), then test with them; never part of `test`
	@$(PREPARE) test
	@exec $(BIN)/python -m pytest tests/clients/check_python.py tests/clients/check_mcp.py $(ARGS)

quick: ## The tests that need no services, in under a minute (no set-up of Triton, Redis or torch)
	@$(PREPARE) quick
	@exec $(BIN)/python -m tests --quick --pytest="$(ARGS)"

check: ## Lint, format, types, import directions, pages
	@$(PREPARE) check
	@$(MAKE) --no-print-directory lint
	@exec $(BIN)/python -m pytest -q -m 'not slow' tests/check tests/docs

lint:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

fuzz: ## Draw new random cases until Ctrl-C
	@$(PREPARE) check
	@while $(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile=fuzz $(ARGS); do :; done

demo-fleet: ## Set up, then a control plane and 20 devices: weights with a promise, and what is stopped by name
	@$(PREPARE) fleet && exec $(BIN)/python -m tests.bed.fleet.demo $(ARGS)

encoders:
	@$(PREPARE) bench
	@$(BIN)/python -m pip install -q --require-hashes -r edge_node/deploy/requirements-parts.txt
	@$(BIN)/causeway-models pull speech $(if $(YES),--yes)

demo-voice: encoders ## Spoken commands on the device, measured (needs espeak-ng; DATA=hwu64.jsonl: its held-back rows)
	@exec $(BIN)/python -m tests.bench voice $(if $(DATA),--data $(DATA)) $(ARGS)

demo-invoice: encoders ## Typed and spoken questions about an image, answered by a 0.5B model on the device (needs espeak-ng)
	@$(BIN)/causeway-models pull demo:qwen $(if $(YES),--yes)
	@exec $(BIN)/python -m tests.bench parts invoice $(ARGS)

bench: ## Set up, then measure against the parts themselves
	@$(PREPARE) bench && exec $(BIN)/python -m tests.bench $(or $(ARGS),all)

bench-llm: ## Measure the engine on real weights (0.5B, which it pulls) beside llama.cpp's servers and raw llama_decode
	@$(PREPARE) bench
	@$(BIN)/python -m pip install -q --require-hashes -r tests/bench/decoding/requirements.txt
	@$(BIN)/causeway-models pull demo:qwen $(if $(YES),--yes)
	@exec $(BIN)/python -m tests.bench real-weights $(ARGS)

bench-peers: ## Measure our edge beside Envoy, vllm-router, SMG, nginx and LiteLLM, which it sets up (YES=1: unasked)
	@$(PREPARE) check && exec $(BIN)/python -m tests.bench peers $(if $(YES),--yes) $(ARGS)

dist: ## Build wheels, sdists, npm package, llama.cpp's wheel, checksums, SBOM into dist/ (ARGS='--check aarch64')
	@$(PREPARE) dist && exec $(BIN)/python -m tests.prepare.dist $(ARGS)

dist-check: ## Install dist/ where nothing of ours is, and time the first answer (ARGS='debian aarch64': more)
	@$(PREPARE) dist && exec $(BIN)/python -m tests.prepare.dist_check $(ARGS)

release: ## Build, check, test and tag the release VERSION in this checkout; nothing is pushed (ARGS=aarch64: for it)
	@$(PREPARE) dist && exec $(BIN)/python -m tests.prepare.release "$(VERSION)" $(ARGS)

docs: ## Write the pages' reference tables again from the code
	@$(PREPARE) check && $(BIN)/python -m tests.docs

site: ## Build the pages as a site in build/site (MkDocs Material, installed once in .venv-site; then without network)
	@$(PREPARE) check
	@test -x .venv-site/bin/mkdocs || { $(BIN)/python -m venv .venv-site && .venv-site/bin/python -m pip install -q --require-hashes --only-binary :all: -r docs/requirements.txt; } || { rm -rf .venv-site; exit 1; }
	@$(BIN)/python -m tests.docs.site .venv-site/bin/mkdocs

train-setup: ## Add torch, for making models again (CAUSEWAY_TORCH names the build)
	@$(PREPARE) train

lock: ## Write the lock files again from pyproject.toml (needs uv in .venv)
	@$(PREPARE) lock

clean: ## Remove the environments and caches in this checkout (the compiled llama.cpp stays in the user's cache)
	rm -rf .venv .venv-triton .venv-peers .venv-site .run build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [ -d "$(CACHE)/vllm" ]; then du -sh "$(CACHE)/vllm"; echo "vLLM stays for all checkouts: rm -r $(CACHE)/vllm"; fi
