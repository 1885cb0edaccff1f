# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh Debian or Ubuntu machine with root: `make demo` and `make test`.
# Each target installs what it needs; nothing but .build/ and native/build/ is written in the tree.

PYTHON  ?= /usr/bin/python3
BUILD   := $(CURDIR)/.build
VENV    := $(BUILD)/venv
BIN     := $(VENV)/bin
# ansible looks for collections by path; the checkout becomes one through a link.
COLLECTION := $(BUILD)/collections/ansible_collections/vgpu/fleet
export PATH := $(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

APT_BASE  := python3 python3-venv gcc libc6-dev make
APT_HOSTS := podman runc conmon mmdebstrap dpkg-dev apt-utils uidmap
APT_TEST  := shellcheck clang libclang-rt-dev git strace iproute2 util-linux procps gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
APT_E2E   := openssl iproute2 util-linux podman mmdebstrap containernetworking-plugins

.DEFAULT_GOAL := help
.PHONY: help demo demo-down test test-fast lint sanity unit integration native-test native-slow page gpu-check molecule molecule-all native venv collection docs lock clean apt-base apt-hosts apt-test

help:
	@echo "make demo       three simulated GPU hosts, from bare to verified; needs root, no GPU"
	@echo "make demo-down  remove everything that the demo made"
	@echo "make test       every gate: lint, sanity, unit, native, molecule (CONTRIBUTING.md names each)"
	@echo "make bench      the figures of libvgpu.so, as a table (tests/bench)"
	@echo "make e2e        the device plugin under a real Kubernetes (tests/e2e); the first run builds it"
	@echo "make bench-hosts  remote calls and seconds of site.yml by the number of hosts"
	@echo "make fuzz       the parsers of limits and ledger on any bytes, minutes each (tests/fuzz)"
	@echo "make native     build the C parts into native/build"
	@echo "make gpu-check  measure libvgpu.so on this host's GPU; needs a C compiler and python3 alone"
	@echo "make docs       pages of variables, modules and roles; HTML in .build/docs/html"
	@echo "make lock       resolve requirements/*.in again"

apt-base:
	@tools/apt.sh $(APT_BASE)

apt-hosts: apt-base
	@tools/apt.sh $(APT_HOSTS)

apt-test: apt-hosts
	@tools/apt.sh $(APT_TEST)

venv: apt-base
	@tools/venv.sh $(VENV) requirements/test.txt $(PYTHON)

collection:
	@mkdir -p $(dir $(COLLECTION))
	@ln -sfn $(CURDIR) $(COLLECTION)

native: apt-base
	@$(MAKE) --no-print-directory -C native/gpusim
	@$(MAKE) --no-print-directory -C native/vcuda

demo: apt-hosts collection
	@tools/demo.sh

demo-down:
	@tools/demo.sh down

# SLOW_MINUTES: also the sweeps, as far as they fit into so many minutes from the start. SLOW: only these, with commas.
SLOW_MINUTES ?=
SLOW ?=
test: apt-test venv collection
	@$(BIN)/python tools/gates.py $(if $(SLOW_MINUTES),--slow $(SLOW_MINUTES)) $(if $(SLOW),--only $(SLOW))

# Everything, and site.yml killed at twenty random moments instead of five. Hours on a busy machine.
.PHONY: test-slow
test-slow: apt-test venv collection
	@VGPU_FAULTS=$(or $(VGPU_FAULTS),20) $(BIN)/python tools/gates.py --slow 600

# What a person runs while working: all but sanity and the simulated hosts.
test-fast: apt-test venv collection
	@$(BIN)/python tools/gates.py lint unit native integration

lint sanity unit integration molecule native-slow page: apt-test venv collection
	@$(BIN)/python tools/gates.py $@

# Every scenario, one after the other; `make molecule` runs the one that is part of `make test`.
molecule-all: apt-test venv collection native
	@tools/molecule.sh

.PHONY: molecule-ubuntu
# Hosts of Ubuntu 24.04 and 22.04 on a machine of Debian; their packages come from Ubuntu's archive.
molecule-ubuntu: apt-test venv collection native
	@tools/molecule.sh ubuntu

native-test: apt-test venv collection
	@$(BIN)/python tools/gates.py native

# Installs nothing and needs no root: it must run on any host that has a GPU.
gpu-check:
	@python3 tests/gpu/check.py $(GPU_CHECK)

.PHONY: e2e-scheduler
# The scheduler's extender and webhook before the real API server and kube-scheduler of tests/e2e; nodes are objects alone.
e2e-scheduler: apt-test venv collection native
	@tools/venv.sh $(BUILD)/scheduler requirements/scheduler.txt $(PYTHON)
	@$(BIN)/python tests/e2e/run.py $(BIN)/python -m pytest -q --no-header -p no:cacheprovider $(or $(E2E),tests/e2e_scheduler)

.PHONY: e2e
# Outside `make test`: a first run builds Kubernetes out of its Go modules.
e2e: apt-test venv collection native
	@tools/apt.sh $(APT_E2E)
	@tools/venv.sh $(BUILD)/scheduler requirements/scheduler.txt $(PYTHON)
	@$(BIN)/python tests/e2e/run.py $(BIN)/python -m pytest -q --no-header -p no:cacheprovider $(or $(E2E),tests/e2e)

.PHONY: packages-rpm
# nvidia_driver and nvidia_docker on real dnf and zypper, in a Debian root that has both (tests/rpm); needs root.
packages-rpm: apt-test venv collection
	@$(BIN)/python -m pytest -q --no-header -p no:cacheprovider $(or $(RPM),tests/rpm)

.PHONY: fuzz
# Seconds of each fuzzer run in every test; here minutes.
fuzz: apt-test venv collection
	@$(BIN)/python -m pytest -q --no-header -p no:cacheprovider -s tests/fuzz --seconds $(or $(FUZZ_SECONDS),300)

.PHONY: bench bench-long
# The table of tests/bench: gates are counts and ratios, times are reported. bench-long adds the sweeps.
bench bench-long: apt-test venv collection native
	@$(BIN)/python -m pytest -q --no-header -p no:cacheprovider tests/bench --form $(if $(filter bench-long,$@),long,bench)

.PHONY: bench-hosts
# Remote calls and seconds of site.yml by the number of hosts: BENCH_HOSTS="--first 3,10,30" for the long form.
bench-hosts: apt-test venv collection native
	@tests/hosts/payload.sh
	@$(BIN)/python tests/bench/hosts.py $(BENCH_HOSTS)

# Pages of variables and modules in docs/, and HTML of every module and role in .build/docs/html. An environment of its own,
# so that a pin of these tools never moves those of the tests.
docs: apt-base
	@tools/venv.sh $(BUILD)/docs-env requirements/docs.txt $(PYTHON)
	@$(BUILD)/docs-env/bin/python tools/variables.py
	@$(BUILD)/docs-env/bin/python tools/pages.py

.PHONY: execution-environment
# The build context of an execution environment for AWX, in .build/ee/context; docs/awx.md builds an image of it.
execution-environment: apt-base
	@tools/venv.sh $(BUILD)/docs-env requirements/docs.txt $(PYTHON)
	@tools/execution_environment.sh

lock: apt-base
	@test -x $(BUILD)/uv/bin/uv || { $(PYTHON) -m venv $(BUILD)/uv && $(BUILD)/uv/bin/pip -q install uv; }
	@for name in controller docs plugin scheduler test; do \
	    $(BUILD)/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	        --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	        requirements/$$name.in -o requirements/$$name.txt; \
	done

clean:
	rm -rf $(BUILD) native/build
