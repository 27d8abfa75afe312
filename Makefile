# Every target makes what it needs: an empty clone, python3 and make are enough.
PYTHON ?= python3
VENV   ?= .venv
BENCH_VENV ?= .venv-bench
VLLM_VENV ?= .venv-vllm
TRL_VENV ?= .venv-trl
VERL_VENV ?= .venv-verl
RAY_VENV ?= .venv-ray

BIN   := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(BENCH_VENV)/.ready
VLLM_READY := $(VLLM_VENV)/.ready
TRL_READY := $(TRL_VENV)/.ready
VERL_READY := $(VERL_VENV)/.ready
RAY_READY := $(RAY_VENV)/.ready
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
CONSTRAINTS ?= requirements/constraints.txt
PIP_INSTALL := -m pip install -qq --no-input $(addprefix -c ,$(CONSTRAINTS))

# Two workers with one thread each: more threads than cores make the tests slower, and sums depend on thread count.
TEST_ARGS ?= -n 2 --dist worksteal -m "not long" --durations=20 --durations-min=1
DEMO_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes: what one of them has compiled is there for the next.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo shell test test-long test-web test-engines test-trl test-verl test-ray test-vllm lint format web docs wheel clean
.PHONY: bench bench-step bench-ladder bench-score bench-sweep bench-power bench-tune bench-service bench-explorer bench-kills

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## a whole study of a tiny pair, with its report (minutes; DEMO_ARGS=--quick: about one)
	@$(BIN)/gatespace run demo $(DEMO_ARGS)

shell: $(READY) ## a shell in which `gatespace` is a command; leave it with `exit`
	@VIRTUAL_ENV="$(abspath $(VENV))" PATH="$(abspath $(BIN)):$$PATH" "$${SHELL:-/bin/sh}"

test: $(READY) ## run the tests and docstring examples
	@$(ONE_THREAD) $(BIN)/python -m pytest $(TEST_ARGS)

test-long: $(READY) ## the tests that take longest: benchmark scripts, many kills, the whole depth of a real model
	@$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -m long tests

test-web: ## the tests of the front end (needs Node 20); with its packages there, `make test` checks accessibility too
	@cd web && npm ci --silent && npm run --silent check && npm test --silent

test-engines: ## the tests inside TRL, verl and Ray, each in an environment of its own (5 GB), two at a time
	@$(MAKE) --no-print-directory -j 2 --output-sync=target test-trl test-verl test-ray

test-trl: $(TRL_READY)
	@$(ONE_THREAD) $(TRL_VENV)/bin/python -m pytest tests/addons/trl src/gatespace/addons/trl $(ENGINE_ARGS)

test-verl: $(VERL_READY)
	@$(ONE_THREAD) $(VERL_VENV)/bin/python -m pytest tests/addons/verl $(ENGINE_ARGS)

test-ray: $(RAY_READY)
	@$(ONE_THREAD) $(RAY_VENV)/bin/python -m pytest tests/addons/cluster/ray tests/addons/cluster/test_ray_cluster.py $(ENGINE_ARGS)

test-vllm: $(READY) $(VLLM_READY) ## the tests that need a real vLLM server (its environment has 3.5 GB)
	@$(ONE_THREAD) GATESPACE_VLLM="$(abspath $(VLLM_VENV))/bin/python" \
	  $(BIN)/python -m pytest tests/addons/vllm $(VLLM_ARGS)

lint: $(READY) ## ruff, mypy, the import contracts, and lines per folder beside their ceilings
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/lines.py

format: $(READY) ## rewrite the code in the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(BENCH_READY) ## measure the loss beside its peers (large: several GiB of memory)
	@$(BENCH_VENV)/bin/python benchmarks/loss.py $(BENCH_ARGS)

bench-step: $(BENCH_READY) ## measure a whole step beside TRL and a plain loop (SmolLM2; 12 GiB of memory)
	@$(BENCH_VENV)/bin/python benchmarks/step.py $(BENCH_ARGS)

bench-ladder: $(BENCH_READY) ## what each speed-up of a step buys, and how far the limit is
	@$(BENCH_VENV)/bin/python benchmarks/ladder.py $(BENCH_ARGS)

bench-score: $(READY) ## what a teacher's scores cost: one response per prompt and several, cached or not
	@$(BIN)/python benchmarks/score.py $(BENCH_ARGS)

bench-tune: $(READY) ## does the search find a planted effect, and none where there is none
	@$(BIN)/python benchmarks/tune.py $(BENCH_ARGS)

bench-power: $(READY) ## seeds and CPU-hours that tell two methods apart, by responses per prompt
	@$(BIN)/python benchmarks/power.py $(BENCH_ARGS)

bench-sweep: $(READY) ## what one teacher cache for all runs of a study saves (the demo; BENCH_ARGS for SmolLM2)
	@$(BIN)/python benchmarks/sweep.py $(BENCH_ARGS)

bench-service: $(READY) $(VLLM_READY) ## tokens scored per second in this process, over ZMQ, and by vLLM
	@$(BIN)/python benchmarks/service.py --vllm $(VLLM_VENV)/bin/python $(BENCH_ARGS)

bench-explorer: $(READY) ## frames per second of the explorer in Chromium
	@$(BIN)/python benchmarks/explorer.py $(BENCH_ARGS)

bench-kills: $(TRL_READY) ## runs killed at random and resumed, beside TRL's trainer: same loss, same bytes?
	@$(ONE_THREAD) $(TRL_VENV)/bin/python benchmarks/kills.py $(BENCH_ARGS)

web: test-web ## build the pages of the front end into the package (needs Node 20; the built files are committed)
	@cd web && npm run --silent build

docs: $(READY) ## build the site into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet: it hides warnings from --strict too
	@echo "site: build/site/index.html"

wheel: $(READY) ## build the wheel and the source archive into build/dist
	@rm -rf build/dist
	@$(BIN)/python -m build --no-isolation --outdir build/dist .

clean: ## remove what was built; the environments stay
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last, so an interrupted installation resumes; it is renewed when the dependencies change.
$(READY): pyproject.toml $(CONSTRAINTS)
	$(call install,$(VENV),dev)

$(BENCH_READY): pyproject.toml $(CONSTRAINTS)
	$(call install,$(BENCH_VENV),bench)

# vLLM brings packages for images and sound in CUDA builds, which fail to import on a machine without a GPU, and vLLM
# with them. What else it brings is held when gatespace comes in beside it.
$(VLLM_READY): requirements/vllm.txt
	@echo "Installing vLLM into $(VLLM_VENV) (3.5 GB)"
	@"$(PYTHON)" -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-input -r requirements/vllm.txt
	@$(VLLM_VENV)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip freeze --exclude-editable > $(VLLM_VENV)/held.txt
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-input -c $(VLLM_VENV)/held.txt -e '.[train,service]'
	@touch $@

$(TRL_READY): requirements/trl.txt pyproject.toml $(CONSTRAINTS)
	$(call engine,$(TRL_VENV),requirements/trl.txt,[trl])

$(VERL_READY): requirements/verl.txt pyproject.toml $(CONSTRAINTS)
	$(call engine,$(VERL_VENV),requirements/verl.txt,[verl])

$(RAY_READY): requirements/ray.txt pyproject.toml $(CONSTRAINTS)
	$(call engine,$(RAY_VENV),requirements/ray.txt,[ray$(comma)remote])

comma := ,

# $(call engine,ENVIRONMENT,REQUIREMENTS,EXTRAS)
define engine
	@echo "Installing what $(2) names into $(1) (a few minutes the first time)"
	@"$(PYTHON)" -m venv $(1)
	@$(1)/bin/python $(PIP_INSTALL) -e '.$(3)'
	@# What the engine has chosen is held: pip does not find a way through all of it at once.
	@$(1)/bin/python -m pip freeze --exclude-editable > $(1)/held.txt
	@$(1)/bin/python -m pip install -qq --no-input -c $(1)/held.txt -r $(2)
	@touch $@
endef

# $(call install,ENVIRONMENT,EXTRA)
define install
	@command -v "$(PYTHON)" >/dev/null || { echo "gatespace needs Python 3.11 or newer; there is no '$(PYTHON)' here." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "gatespace needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing gatespace into $(1) (a few minutes the first time)"
	@"$(PYTHON)" -m venv $(1) || { echo "Python's venv module is not usable (on Debian: apt install python3-venv)." >&2; exit 1; }
	@$(1)/bin/python $(PIP_INSTALL) -e '.[$(2)]'
	@touch $@
endef
