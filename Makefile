# The tasks of this repository. `make test` and `make demo` install what they need into .venv first.
PY ?= python3
BIN := .venv/bin
CONSTRAINTS := constraints.txt
# The tests start hundreds of processes: each would compile all modules anew where this is set, as images of containers do.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test-vllm
.PHONY: release test-fleet test-install test-wheels test test-whole test-clients test-gpu check demo demo-agent fleet try-wheel prove bench lint check-generated generate install campaigns campaign-fairness campaign-fleet campaign-history campaign-moves campaign-sizes bench-moves campaign-handover hammer mutants fresh help

help:            ## Show this list
	@awk -F ':.*## ?' '/^[a-z-]+:.*##/ {printf "%-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: install    ## What CI runs: lint, types, contract, tests; of the long ones the commit's part
	@$(MAKE) --no-print-directory -j 2 lint tested KVASIR_TURN=$(KVASIR_TURN)

# Beside mypy, which has one core. First what the tests import is compiled, and their asserts: each worker would do it.
# Three workers for two cores: a test often waits for a service, a process or a timeout, and four had no more to share.
.PHONY: tested
tested: compiled
	KVASIR_TURN=$(KVASIR_TURN) $(BIN)/python -m pytest -n 3 --dist worksteal --durations=20

# Long tests take turns from commit to commit (tests/long_tests.py); without git the first part runs.
KVASIR_TURN ?= $(shell git rev-parse -q --verify HEAD 2>/dev/null || echo 0)

test-whole: install ## As `make test`, with all long tests: before a release, and once a day
	@$(MAKE) --no-print-directory test KVASIR_TURN=

.PHONY: compiled
compiled: install
	@KVASIR_TURN=$(KVASIR_TURN) $(BIN)/python -m pytest --collect-only -qq | grep 'long tests' || true  # the tests say what is wrong

# What needs no service, no model and no disk that syncs, and takes no turns: chosen by measurement, a minute in all.
CHECKED := -m "not long" $(addprefix tests/inference/,edge memory model scheduling text turns) \
  $(patsubst %,--ignore=tests/inference/model/test_%.py,lean_transformers probe_memory text_embedder file_limit) \
  $(patsubst %,--ignore=tests/%.py,inference/model/loading/test_mapped_weights bench/test_lab bench/test_make_model kvasir/test_lean_imports) \
  $(patsubst %,--ignore=tests/inference/text/test_%.py,special_tokens) --ignore=tests/inference/text/templates/test_tools_order.py \
  $(patsubst %,--ignore=tests/kvasir/%.py,server/test_log_errors server/test_crowds clients/test_streams_read_to_their_end clients/test_lost_turns) \
  --ignore-glob='tests/kvasir/store_for_*' --ignore=tests/bench/fleet \
  tests/bench tests/kvasir tests/campaigns/mutation tests/campaigns/fairness/test_shared_resources.py tests/test_walls.py tests/test_lessons.py tests/test_readme.py tests/test_words.py

check: install ## While you work, a minute: lint, types, tests without services and models
	@$(MAKE) --no-print-directory -j 2 lint checked

.PHONY: checked
checked: install
	$(BIN)/python -m pytest -n 2 --dist worksteal $(CHECKED)

test-gpu: install ## KV and engine on the GPU that MLX finds, TF32 off; says so where there is none
	$(BIN)/python -m tests.on_gpu $(GPU)

test-vllm: install ## The KV connector in unmodified vLLM; VLLM=a Python that has vLLM
	KVASIR_VLLM_PYTHON='$(VLLM)' $(BIN)/python -m pytest -n 0 tests/vllm

demo: install    ## Two agents live, die by kill -9, and go on; then one moves
	$(BIN)/kvasir demo

fleet: install   ## Three engines on PostgreSQL and S3; ENGINES=5 STORES=2 DOOR=envoy DIR=…
	@$(BIN)/python -m tools.fleet $(if $(DIR),--dir '$(DIR)') $(if $(ENGINES),--engines '$(ENGINES)') $(if $(STORES),--stores '$(STORES)') $(if $(DOOR),--door '$(DOOR)')

demo-agent: install ## A coding agent with 30,000 tokens of instructions is killed; minutes
	$(BIN)/kvasir demo --agent

try-wheel: install ## The wheel in an empty environment tests itself
	rm -rf out/wheel && $(BIN)/python -m hatchling build -t wheel -d out/wheel
	$(PY) -m venv out/wheel/env
	out/wheel/env/bin/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) "$$(ls out/wheel/*.whl)[all]"
	home=$$(mktemp -d) && out/wheel/env/bin/kvasir --home "$$home" doctor --self-test; code=$$?; rm -rf "$$home"; exit $$code

release: install ## All packages of the tag's version, into out/release; TRY=1 without a tag, AT=URL
	$(BIN)/python -m tools.release $(if $(TRY),--try) $(if $(AT),--at '$(AT)')

test-install: install ## A release, and what the pages type, in empty homes; INSTALL="go image" for some
	$(BIN)/python -m tests.install $(INSTALL)

prove: install   ## Check and measure this machine, a quarter of an hour; goes on; PROVE=--quick
	$(BIN)/kvasir prove --out out/prove $(PROVE)

# uv resolves and unpacks for another system than its own, and takes no source: MLX's wheels want macOS 14.
FOR_A_MAC = MACOSX_DEPLOYMENT_TARGET=14.0 UV_CACHE_DIR=out/uv/cache $(BIN)/uv pip
A_MAC := -q --only-binary :all: --python-platform aarch64-apple-darwin
test-wheels: install ## All wheels for Apple silicon are there, on Python 3.11 to 3.14; downloads 3 GB
	@for python in 3.11 3.12 3.13 3.14; do rm -rf out/uv/mac; \
	  $(FOR_A_MAC) compile $(A_MAC) --python-version $$python --all-extras -c $(CONSTRAINTS) pyproject.toml -o out/uv/wheels.txt \
	  && $(FOR_A_MAC) install $(A_MAC) --python-version $$python --no-deps --target out/uv/mac -r out/uv/wheels.txt \
	  && echo "Python $$python: $$(ls -d out/uv/mac/*.dist-info | wc -l) wheels unpacked, nothing is compiled" || exit 1; done

# All three run, whatever the first finds; a missed target still fails the whole.
bench: install   ## Measure store, engine and KV policies on a quiet machine; pictures in out/bench
	@missed=0; \
	$(BIN)/kvasir bench store || missed=1; \
	$(BIN)/kvasir bench engine --peer mlx-lm --plots out/bench --keep out/bench/engine.json || missed=1; \
	$(BIN)/kvasir bench quality || missed=1; \
	exit $$missed

test-clients: install ## Build and run clients of other languages; CLIENTS="go" for some
	$(BIN)/python -m tests.conformance $(CLIENTS)

lint: install check-generated ## ruff, mypy, buf; the contract against the last tag
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy clients/python/kvasir clients/python/kvasir_gateway clients/python/kvasir_orchestrator clients/python/kvasir_bench cachestore_svc inference_svc
	$(BIN)/buf lint proto
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null) || exit 0; \
	$(BIN)/buf breaking proto --against ".git#tag=$$tag,subdir=proto"

check-generated: install ## Committed stubs are what proto/ generates
	@$(BIN)/python -c 'import grpc_tools' 2>/dev/null || { echo "Stubs: NOT CHECKED, grpcio-tools has no wheel for this Python"; exit 0; }; \
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && tools/generate.sh "$$tmp" && \
	for f in $$(cd "$$tmp" && find . -type f); do cmp "$$tmp/$$f" "clients/python/$$f" || { echo "run 'make generate'"; exit 1; }; done

generate: install ## Write the stubs of proto/, and copy it into the clients that are built from it
	tools/generate.sh
	tools/generate_clients.sh

install: .venv/.installed ## Make .venv with everything; a second run does nothing

# pip and setuptools of ensurepip are years old and have known holes: they are pinned like the rest. PY's own pip fills a
# bare environment in half the time that ensurepip and a renewal take; where PY has no pip, ensurepip does.
INSTALLERS := install -q --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -U pip setuptools uv
# uv takes 25 s where pip takes 60; where it finds no way to the registry that pip's own settings know, pip goes on.
.venv/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PY) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Kvasir needs Python 3.11 or later; $(PY) is %s. Name another: make PY=python3.13 ..." % sys.version.split()[0])'
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then $(BIN)/python -m pip $(INSTALLERS); else \
	  rm -rf .venv; $(PY) -m venv --without-pip .venv && $(PY) -m pip --python $(BIN)/python $(INSTALLERS) 2>/dev/null || { \
	  rm -rf .venv; $(PY) -m venv .venv && $(BIN)/python -m pip $(INSTALLERS); }; fi
	$(BIN)/uv pip install -q --python $(BIN)/python -c $(CONSTRAINTS) -e '.[dev]' || \
	  $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

test-fleet: install ## The suite of the store's ports on PostgreSQL, and kills of both; ten minutes
	$(BIN)/python -m pytest -n 2 --timeout 900 -m fleet tests/cachestore

campaigns: install ## The long forms of sampled tests (tests/CAMPAIGNS.md); hours on two cores
	$(BIN)/python -m tests.cachestore.core.survival.kill_campaign --kills 2000
	$(BIN)/python -m tests.cachestore.core.survival.kill_campaign --kills 2000 --sealed
	$(BIN)/python -m tests.cachestore.core.survival.flip_campaign --flips 5000
	$(BIN)/python -m tests.cachestore.core.survival.flip_campaign --flips 5000 --sealed
	$(BIN)/python -m tests.cachestore.core.survival.damage_campaign --stores 500
	$(BIN)/python -m tests.inference.formats.call_campaign
	$(BIN)/python -m tests.campaigns.fuzz store --requests 20000 --seed 7
	$(BIN)/python -m tests.campaigns.fuzz engine --requests 20000 --seed 4
	$(BIN)/python -m tests.campaigns.fuzz gateway --requests 20000 --seed 5
	KVASIR_KILLS=200 $(BIN)/python -m pytest --timeout 7200 tests/cachestore/service/test_kills.py
	$(BIN)/python -m pytest --timeout 7200 -m campaign
	KVASIR_WHOLE=1 $(BIN)/python -m pytest -n 3 --dist worksteal --timeout 7200

campaign-fairness: install ## One namespace does its worst beside another, by every shared resource; an hour
	$(BIN)/python -m tests.campaigns.fairness.campaign $(FAIRNESS)
	$(BIN)/python -m tests.campaigns.fairness.loop_time

campaign-history: install ## Random lives over two engines and one store: no turn knows what was taken back
	$(BIN)/python -m pytest --timeout 7200 -m campaign -s tests/campaigns/history

campaign-fleet: install ## Kills, cuts and set clocks of a whole fleet; FLEET="--resume --minutes 60"
	$(BIN)/python -m tests.campaigns.fleet.campaign $(FLEET)

campaign-moves: install ## Agents move among three stores that are cut and killed; half an hour
	$(BIN)/python -m tests.campaigns.moves.campaign --moves $(or $(MOVES),2000)

campaign-sizes: install ## Memories of gigabytes by a store that is killed; half an hour, 30 GB of disk
	$(BIN)/python -m tests.campaigns.sizes.campaign $(SIZES)

bench-moves: install ## 100 MB move between two network namespaces, beside raw TCP; Linux, root
	$(BIN)/python -m tests.campaigns.moves.link

campaign-handover: install ## 300 turns move between two engines, 40 more while something breaks; half an hour
	$(BIN)/python -m tests.inference.handover.handover_campaign

hammer: install ## Many agents at once, each turn compared with the same turn alone; goes on
	$(BIN)/python -m tests.campaigns.hammer $(HAMMER)

mutants: install ## Break the code once per mutant, and write which test notices; goes on
	$(BIN)/python -m tests.campaigns.mutation $(MUTANTS)

.PHONY: docs
docs: install    ## The documentation as a site, without the network: out/site/index.html
	$(BIN)/python -m tools.site out/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict -f docs/mkdocs.yml
	@echo "open out/site/index.html; its search wants a server: $(PY) -m http.server -b 127.0.0.1 -d out/site"

.PHONY: bench-http test-http-clients test-agents test-page test-smg test-templates
bench-http: install ## 200 streams through the gateway, then 500 readers who leave
	$(BIN)/python -m tests.gateway.http_load $(HTTP)

test-http-clients: install ## LangChain, LiteLLM, Ollama's client, the AI SDK, curl; installs them into out/
	$(BIN)/python -m tests.gateway.clients out/http-clients

test-agents: install ## Unmodified coding agents and frameworks; AGENTS="claude --whole" for one, whole
	$(BIN)/python -m tests.gateway.agents out/agents $(AGENTS)

test-templates: install ## Chat templates of sixteen models as published; downloads them into out/
	$(BIN)/python -m tests.inference.text.templates.published_templates out/templates

test-smg: install ## SMG, the neighbour's gateway, before an engine; installs it into out/
	$(BIN)/python -m tests.gateway.smg out/smg

test-page: install ## The page in headless Chromium: axe-core, keyboard, no scripts; pictures in out/
	$(BIN)/python -m tests.gateway.page.browser out/page

.PHONY: test-langgraph
test-langgraph: install ## The LangGraph example before real services; installs LangGraph into out/
	$(BIN)/python -m tests.orchestrator out/langgraph

fresh:           ## Remove what the tasks made
	rm -rf .venv out
