# Every target sets up .venv first, once, and again when the pins or pyproject.toml change; test-latest, test-oldest,
# test-integrations and test-ray have their own.
PYTHON ?= python3
BIN := .venv/bin
LATEST := .venv-latest
OLDEST := .venv-oldest
INTEGRATIONS := .venv-integrations
RAY := .venv-ray
test-ray: REPEATS ?= 1
chaos: MINUTES ?= 60
fuzz: MINUTES ?= 10
INSTRUMENTED := build/libjpeg-turbo/libjpeg.so.62
# Hundreds of processes of the tests import the same modules: Python is to keep what it compiled, also where a container
# says otherwise. So pip need not compile what nothing imports.
unexport PYTHONDONTWRITEBYTECODE
# $(call install,VENV,PACKAGES) installs these packages and gpuflow: with uv, which needs a fifth of pip's time; with pip
# where uv finds no packages, because only pip's settings name their index.
define install
	$(1)/bin/python -m pip install --quiet --no-compile --constraint requirements.txt uv
	$(call uv_or_pip,$(1),$(2))
	$(call install_gpuflow,$(1))
endef
uv_or_pip = $(1)/bin/uv pip install --python $(1)/bin/python $(2) || $(1)/bin/python -m pip install --no-compile $(2)
# A warning of the C compiler is an error here alone: a newer compiler's is not to break an installation by pip.
install_gpuflow = export CFLAGS="$$CFLAGS -Werror"; $(call uv_or_pip,$(1),-e . --no-deps --no-build-isolation)
# The C library, which is built again when its source changes.
NATIVE := gpuflow/native/_library.abi3.so
# One more than there are cores: some tests wait for processes. torch's threads are not to spin for work meanwhile, which
# would take a quarter of the processor time from the others.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
pytest_by = OMP_WAIT_POLICY=passive $(1)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile
PYTEST := $(call pytest_by,.venv)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-experiments test-portable test-platforms check collect docs bench chaos mutants fuzz test-latest test-oldest test-integrations test-wheel test-ray

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 26

demo: $(NATIVE)  ## make sample photographs, train on them, compare loaders
	$(BIN)/gpuflow samples data/photos -n 2000
	$(BIN)/gpuflow train configs/demo.yaml --force
	$(BIN)/gpuflow bench configs/demo.yaml --workers 1,2 --workloads pipeline --against dataloader --out plots/out

# What experiments/ holds answers a question once; its tests run in a job of their own in .github/workflows/ci.yml.
test: $(NATIVE)  ## run the tests but the slow ones and those of experiments, files side by side
	$(PYTEST) --ignore tests/experiments -m "not slow and not integrations"

test-slow: $(NATIVE)  ## run the slow tests, files side by side
	$(PYTEST) --ignore tests/experiments -m "slow and not integrations"

test-experiments: $(NATIVE)  ## run the tests of experiments, files side by side
	$(PYTEST) tests/experiments

test-portable: $(NATIVE)  ## run the tests of the native code as on a processor without AVX2
	GPUFLOW_NATIVE=portable $(BIN)/python -m pytest -m "not slow" tests/laws/test_output_hashes.py \
		tests/laws/test_native_laws.py tests/laws/test_mask_laws.py tests/execute/cpu/test_resample.py \
		tests/execute/cpu/test_warp.py tests/execute/cpu/test_masks.py tests/stages/test_gaussian_blur.py \
		tests/stages/test_sharpness.py tests/stages/test_color_jitter.py tests/stages/test_rotate.py

test-platforms: $(NATIVE)  ## compare the native code by gcc, clang and on aarch64; skips say what apt installs
	$(BIN)/python -m pytest -rs tests/native/test_platforms.py

check: $(NATIVE)  ## lint, formatting, types, which package imports which, the size of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python .ci/size.py

collect: $(NATIVE)  ## import the tests once, so that the processes of `make test` find them compiled
	@$(BIN)/python -m pytest --ignore tests/experiments --collect-only -qq > .venv/collected || { cat .venv/collected; exit 1; }

docs: .venv/.installed  ## build the documentation into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(NATIVE)  ## measure the loaders: experiments/loader_cpu/results.csv
	$(BIN)/python experiments/loader_cpu/run.py

chaos: $(NATIVE)  ## disturb loaders, trainings and a service for MINUTES=60: experiments/chaos/results.csv
	$(BIN)/python experiments/chaos/run.py --minutes $(MINUTES)

mutants: $(NATIVE)  ## run the tests against faults made on purpose: experiments/mutants/results.csv
	$(BIN)/python experiments/mutants/run.py

fuzz: $(NATIVE)  ## run C code on random programs and damaged JPEGs under sanitizers for MINUTES=10
	@mkdir -p build; test -e "$(INSTRUMENTED)" || tests/native/libjpeg_turbo.sh $(dir $(INSTRUMENTED)) \
		> build/libjpeg-turbo.log 2>&1 || tail -n 1 build/libjpeg-turbo.log
	$(BIN)/python -m tests.native.fuzz --minutes $(MINUTES) --library "$(INSTRUMENTED)"

# The extras whose code the tests run. UNBOUNDED=1 takes away the upper bounds of torch, torchvision and uvicorn.
JOBS := serve export formats plots remote hf samples
BOUNDED := (torch|torchvision|uvicorn)(>=[0-9.]+),<[0-9.]+
# $(call test_with,VENV,OPTIONS) installs what pyproject.toml allows, by uv with these options, and the pinned tools of
# requirements.txt, and runs the tests.
define test_with
	$(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip install --quiet --no-compile --constraint requirements.txt uv
	sed -E '$(if $(UNBOUNDED),s/$(BOUNDED)/\1\2/)' pyproject.toml > $(1)/pyproject.toml
	sed -n '/^# tests/,/^# what/p' requirements.txt > $(1)/tools.txt
	$(1)/bin/uv pip install --python $(1)/bin/python $(2) -r $(1)/pyproject.toml $(JOBS:%=--extra %) -r $(1)/tools.txt
	$(call install_gpuflow,$(1))
	$(call pytest_by,$(1)) -m "not gpu and not integrations"
endef

test-latest:  ## run the CPU tests with the newest versions that pyproject.toml allows; with any: UNBOUNDED=1
	$(call test_with,$(LATEST))

test-oldest:  ## run the CPU tests with the oldest versions that pyproject.toml allows
	$(call test_with,$(OLDEST),--resolution lowest-direct)

test-integrations: $(INTEGRATIONS)/.installed  ## run the adapters' tests against the real libraries
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations tests/test_integrations.py tests/sources/test_hf.py

test-wheel: .venv/.installed  ## build wheel and sources, use both in an empty environment
	$(BIN)/python -m tests.packaging.wheel

test-ray: $(RAY)/.installed  ## lose a node of a cluster of Ray on this machine, REPEATS=1 times
	REPEATS=$(REPEATS) $(RAY)/bin/python -m pytest -m ray tests/integrations/test_ray.py \
		tests/integrations/test_ray_commands.py

$(RAY)/.installed: requirements.txt requirements-ray.txt pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(call install,$(RAY),-r requirements-ray.txt)
	@touch $@

$(INTEGRATIONS)/.installed: requirements.txt requirements-integrations.txt pyproject.toml
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(call install,$(INTEGRATIONS),-r requirements-integrations.txt)
	@touch $@

$(NATIVE): .venv/.installed $(wildcard gpuflow/native/*.[ch])
	$(call install_gpuflow,.venv)
	@touch $@

.venv/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpuflow needs Python 3.11 or newer, and $(PYTHON) is not; run for example make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(call install,.venv,-r requirements.txt)
	@touch $@
