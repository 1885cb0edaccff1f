# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh Debian or Ubuntu machine with root: `make demo` and `make test`.
# Each target installs the packages that it needs. In the tree only .build/ and native/build/ are written.
# The text after a target's `##` is its line of `make help`.

PYTHON  ?= /usr/bin/python3
BUILD   := $(CURDIR)/.build
VENV    := $(BUILD)/venv
BIN     := $(VENV)/bin
# Ansible finds collections by their path, so this path is a link to the checkout.
COLLECTION := $(BUILD)/collections/ansible_collections/vgpu/fleet
export PATH := $(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

GATES  := $(BIN)/python tools/gates.py
PYTEST := $(BIN)/python -m pytest -q --no-header -p no:cacheprovider

APT_BASE  := python3 python3-venv gcc libc6-dev make
APT_HOSTS := podman runc conmon mmdebstrap dpkg-dev apt-utils uidmap
APT_TEST  := shellcheck clang libclang-rt-dev git strace iproute2 util-linux procps gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user prometheus
APT_E2E   := openssl iproute2 util-linux podman mmdebstrap containernetworking-plugins

.DEFAULT_GOAL := help
.PHONY: help demo demo-down rehearse in-checkout
.PHONY: test test-fast test-slow gate lint unit sanity native-test integration molecule native-slow native-hostile page clients
.PHONY: molecule-all molecule-ubuntu packages-rpm archives e2e e2e-scheduler e2e-dra e2e-136 e2e-scheduler-136 fuzz mutants bench bench-long bench-hosts gpu-check
.PHONY: docs artefact chart images execution-environment lock native clean venv collection apt-base apt-hosts apt-test

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-22s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---- the demo

demo: apt-hosts collection ## three simulated GPU hosts, from bare to verified; needs root, no GPU
	@tools/demo.sh

demo-down: ## remove everything that the demo made
	@tools/demo.sh down

# ARGS has more arguments for ansible-playbook, such as "-e rehearse_keep=true".
# ansible.cfg hides skipped tasks, and then Ansible prints the name of a task only with its result. A rehearsal announces
# its slow steps by these names, so here they are printed at once.
rehearse: in-checkout apt-hosts venv collection ## your inventory on simulated hosts: INVENTORY=inventories/yours (docs/rehearse.md)
	@ANSIBLE_DISPLAY_SKIPPED_HOSTS=true $(BIN)/ansible-playbook playbooks/rehearse.yml -i $(or $(INVENTORY),$(error name your inventory: make rehearse INVENTORY=PATH)) $(ARGS)

# MANIFEST.json shows an unpacked or installed artefact.
in-checkout: ## fail in an unpacked artefact, where simulated hosts cannot be built
	@test ! -e MANIFEST.json || { echo '$(CURDIR) is an installed collection; expected a checkout of its repository; clone it and run make there' >&2; exit 1; }

# ---- gates (docs/gates.md)

# Sweeps are checks that take too long for every run, so they are divided into groups. GROUP names the group to run too:
# a number, `turn` (the number of commits selects the group), or `all`.
GROUP =
test: apt-test venv collection ## every gate; GROUP=0 to 4: also the sweeps of that group
	@$(GATES) --group "$(GROUP)"

test-fast: apt-test venv collection ## what a person runs while working: all but sanity and the simulated hosts
	@$(GATES) lint unit native integration

# This takes hours. For example, site.yml is killed at twenty random moments instead of five.
test-slow: apt-test venv collection ## every gate and every sweep, for hours
	@VGPU_FAULTS=$(or $(VGPU_FAULTS),20) $(GATES) --group all

gate: apt-test venv collection ## one gate or sweep: NAME=native-address; without NAME the list of all
	@$(GATES) $(or $(NAME),--list)

lint: ## ruff, mypy, yamllint, shellcheck, ansible-lint, antsibull-changelog
unit: ## tests/unit
sanity: ## ansible-test sanity, galaxy-importer
integration: ## tests/integration without its slow tests
molecule: ## the scenario default: site.yml on two simulated hosts
native-slow: ## the tests that are marked slow
native-hostile: ## the library on a driver that blocks, calls back and tears down
page: ## the fleet report in a headless Chromium
clients: ## numba, cuda-core, taichi and others in a slice; fetches two gigabytes once
lint unit sanity integration molecule native-slow native-hostile page clients: apt-test venv collection
	@$(GATES) $@

native-test: apt-test venv collection ## tests/native without its slow tests
	@$(GATES) native

# ---- sweeps with preparations or options of their own

molecule-all: apt-test venv collection native ## every scenario, one after the other
	@tools/molecule.sh

# Simulates hosts with Ubuntu 24.04 and 22.04 on a Debian machine. Their packages come from Ubuntu's archive.
molecule-ubuntu: apt-test venv collection native ## site.yml and teardown on hosts of Ubuntu
	@tools/molecule.sh ubuntu

# Needs network access to the archives. Fails if an archive no longer has one of the names.
archives: apt-test venv collection ## every package name, key and repository of the tables, asked of the archives
	@$(GATES) archives

# Runs in a Debian root folder that has dnf and zypper (tests/rpm). Needs root.
packages-rpm: apt-test venv collection ## nvidia_driver and nvidia_docker on real dnf and zypper
	@$(PYTEST) $(or $(RPM),tests/rpm)

# Not part of `make test`, because the first run builds Kubernetes from its Go modules.
e2e: apt-test venv collection native ## the device plugin under a real Kubernetes; the first run builds it
	@tools/apt.sh $(APT_E2E)
	@tools/venv.sh $(BUILD)/scheduler requirements/scheduler.txt $(PYTHON)
	@$(BIN)/python tests/e2e/run.py $(PYTEST) $(or $(E2E),tests/e2e)

# Runs the real API server and kube-scheduler of tests/e2e. The nodes are only objects in the API server.
e2e-scheduler: apt-test venv collection native ## the scheduler's extender and webhook under a real Kubernetes
	@tools/venv.sh $(BUILD)/scheduler requirements/scheduler.txt $(PYTHON)
	@$(MAKE) --no-print-directory -C native/plugin proto
	@$(BIN)/python tests/e2e/run.py $(PYTEST) $(or $(E2E),tests/e2e_scheduler)

# Runs Kubernetes 1.36, or the version in VGPU_E2E_KUBERNETES. For 1.34 the feature gate of consumable capacity is on.
e2e-dra: apt-test venv collection native ## claims (Dynamic Resource Allocation) under a real Kubernetes 1.36
	@tools/apt.sh $(APT_E2E)
	@tools/venv.sh $(BUILD)/scheduler requirements/scheduler.txt $(PYTHON)
	@VGPU_E2E_KUBERNETES=$(or $(VGPU_E2E_KUBERNETES),1.36) $(BIN)/python tests/e2e/run.py $(PYTEST) $(or $(E2E),tests/e2e_dra)

e2e-136: ## the device plugin under Kubernetes 1.36
	@$(MAKE) --no-print-directory e2e VGPU_E2E_KUBERNETES=1.36

e2e-scheduler-136: ## the scheduler's extender and webhook under Kubernetes 1.36
	@$(MAKE) --no-print-directory e2e-scheduler VGPU_E2E_KUBERNETES=1.36

# Every test run starts each fuzzer for seconds. This target runs each for minutes.
fuzz: apt-test venv collection ## the parsers of limits and ledger on any bytes, FUZZ_SECONDS=300 each
	@$(PYTEST) -s tests/fuzz --seconds $(or $(FUZZ_SECONDS),300)

# COUNT=0 tries all changes, which takes about two hours. Another SEED selects other changes.
mutants: apt-test venv collection native ## one change at a time in plan, slices, capacity and verdicts: which do unit tests miss?
	@tools/venv.sh $(BUILD)/mutants/venv requirements/mutants.txt $(PYTHON)
	@$(BUILD)/mutants/venv/bin/python tools/mutants.py --seed $(or $(SEED),1) --count $(or $(COUNT),400)

# Counts and ratios are checked against limits. Times are only reported.
bench: ## the figures of libvgpu.so, as a table (tests/bench)
bench-long: ## the same with the long sweeps of kills
bench bench-long: apt-test venv collection native
	@$(PYTEST) tests/bench --form $(if $(filter bench-long,$@),long,bench)

# BENCH_HOSTS="--first 3,10,30" selects the long form.
bench-hosts: apt-test venv collection native ## remote calls and seconds of site.yml by the number of hosts
	@tests/hosts/payload.sh
	@$(BIN)/python tests/bench/hosts.py $(BENCH_HOSTS)

# Installs nothing and needs no root: it must run on any host that has a GPU.
gpu-check: ## measure libvgpu.so on this host's GPU; needs a C compiler and python3 alone
	@python3 tests/gpu/check.py $(GPU_CHECK)

# ---- pages and pins

# Uses a Python environment of its own, so that the versions of these tools never change the versions for the tests.
docs: apt-base ## pages of variables, modules and roles; HTML in .build/docs/html
	@tools/venv.sh $(BUILD)/docs-env requirements/docs.txt $(PYTHON)
	@$(BUILD)/docs-env/bin/python tools/variables.py
	@$(BUILD)/docs-env/bin/python tools/alerts.py
	@$(BUILD)/docs-env/bin/python tools/pages.py

# PLATFORMS=3.11-x86_64 SCHEDULER=none builds it only for such hosts, and without the wheels of the scheduler. A larger
# artefact exceeds the maximum size on Galaxy.
artefact: apt-base venv ## the collection with its wheels and libraries, in .build/artefact; the same bytes each time
	@tools/apt.sh gcc-aarch64-linux-gnu libc6-dev-arm64-cross
	@$(BIN)/python tools/artefact.py --platforms "$(PLATFORMS)" --scheduler "$(SCHEDULER)"

# REGISTRY is the beginning of the images' names, such as registry.example.com/gpu. See docs/chart.md.
REGISTRY = localhost
chart: venv ## a Helm chart and Kustomize bases, in .build/chart; REGISTRY= before the images' names
	@$(BIN)/python tools/chart --registry "$(REGISTRY)"

images: venv ## the images of device plugin and scheduler as files, in .build/images; REGISTRY= as above
	@tools/apt.sh podman mmdebstrap
	@$(BIN)/python tools/images.py --registry "$(REGISTRY)"

# docs/awx.md describes how to build an image from this context.
execution-environment: apt-base ## the build context of an execution environment for AWX, in .build/ee/context
	@tools/venv.sh $(BUILD)/docs-env requirements/docs.txt $(PYTHON)
	@tools/execution_environment.sh

lock: apt-base ## resolve requirements/*.in again
	@test -x $(BUILD)/uv/bin/uv || { $(PYTHON) -m venv $(BUILD)/uv && $(BUILD)/uv/bin/pip -q install uv; }
	@for name in clients clients12 controller docs mutants plugin scheduler test; do \
	    $(BUILD)/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	        --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	        requirements/$$name.in -o requirements/$$name.txt; \
	done

# ---- targets that other targets need

native: apt-base ## build the C parts into native/build
	@$(MAKE) --no-print-directory -C native/gpusim
	@$(MAKE) --no-print-directory -C native/vcuda

venv: apt-base ## the tests' environment, in .build/venv
	@tools/venv.sh $(VENV) requirements/test.txt $(PYTHON)

collection: ## the checkout as an installed collection, in .build/collections
	@mkdir -p $(dir $(COLLECTION))
	@ln -sfn $(CURDIR) $(COLLECTION)

apt-base: ## Debian packages of every target
	@tools/apt.sh $(APT_BASE)

apt-hosts: apt-base ## Debian packages of the simulated hosts
	@tools/apt.sh $(APT_HOSTS)

apt-test: apt-hosts ## Debian packages of the tests
	@tools/apt.sh $(APT_TEST)

clean: ## remove what was built
	rm -rf $(BUILD) native/build
