# make demo: set everything up and do the main job.  make test: set up what tests need and pass them.
# The first of these that runs and can make an environment; PYTHON=... names another. (Debian has
# python3.11 without ensurepip, and a shim of pyenv may be found and not run.)
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13; do \
	if $$each -c 'import ensurepip' >/dev/null 2>&1; then echo $$each; break; fi; done)
FOUND = $(or $(PYTHON),$(error none of python3.11, python3.12 and python3.13 runs here with its \
	ensurepip: install one (on Debian with python3-venv), or name another: make PYTHON=...))
BIN := .venv/bin
UV := $(BIN)/python -m uv
# TORCH=full also installs triton and the CUDA compilers that torch.compile wants on a GPU.
TORCH ?= trimmed
OVERRIDES_trimmed := --overrides overrides.txt
OVERRIDES_full :=
# Test files are shared out among this many processes, of up to 2 GB each: on two cores two compute
# while the others wait for disks, servers and processes of their own.
WORKERS ?= 5
# Where the environment says that no bytecode is written, every process would compile torch, MLflow
# and transformers anew, for seconds; ahead of time, all that is installed would take a minute. What
# is imported here is compiled once, for whoever runs a command later in such an environment.
export PYTHONDONTWRITEBYTECODE :=
COMPILED := torch, torch.export, transformers.modeling_utils, mlflow.store.tracking.sqlalchemy_store

.PHONY: help demo docs test test-native test-engines fuzz test-faults mutants check lint type house format ui screenshots constraints clean

# The first target is what a bare "make" does.
demo: .venv/ready
	$(BIN)/python run.py experiment=quickstart
	@echo
	@echo "Browse it: make ui"

help:
	@echo "make demo          set up, golden run, candidate run, comparison, report"
	@echo "make ui            browse the runs in MLflow"
	@echo "make test          set up what tests need, and run them"
	@echo "make test-native   the native Neuron runtime's tests, with a newer torch"
	@echo "make test-engines  litgpt, llama.cpp, mlx-lm, vLLM, ONNX Runtime and msprobe, really run"
	@echo "make check         layout, rules, types, and the tests that a small change can reach"
	@echo "make docs          build the site of docs/ into build/site"
	@echo "make lint type     what a commit must pass besides;  make format mends the layout"
	@echo "make clean         remove the environments"
	@echo "python run.py --help lists jobs and keys."

ui: .venv/ready
	$(BIN)/python run.py job=ui

test: .venv/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The native runtime on torch's CPU device, golden and comparison beside it: it wants a newer torch
# than torch_xla does, so an environment of its own, without torch_xla.
test-native: .venv-native/ready
	.venv-native/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/native \
		tests/test_runtime_contract.py tests/test_neuron_flavour.py

# Engines that run on a CPU, each with its own dumper, and what we make of what they wrote.
test-engines: .venv-engines/ready
	.venv-engines/bin/python -m pytest -n 2 --dist loadfile tests/engines

# Damaged words and files for whatever we parse; each input follows from SEED and its number.
SEED ?= 0
COUNT ?= 100000
fuzz: .venv/ready
	$(BIN)/python tools/fuzz.py --seed $(SEED) --count $(COUNT)

# Kills, full disks, damaged files, wrong clocks: what is lost, and what is falsely whole.  COUNT is
# of a hundred; ONLY=SUBJECT or SUBJECT:NUMBER makes some again.
test-faults: COUNT = 100
test-faults: .venv/ready
	$(BIN)/python tools/faults.py --seed $(SEED) --count $(COUNT) --only "$(ONLY)"

# Small faults in the source, one at a time: does the nearest file of tests notice?  ONLY="judge making".
mutants: .venv/ready
	$(BIN)/python tools/mutants.py $(ONLY)

# Layout, rules, types, and the tests that the change can reach.  The first time: SECONDS=3600.
SECONDS ?= 90
check: .venv/ready
	$(BIN)/python tools/check.py --seconds $(SECONDS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/house.py --check

type: .venv/ready
	$(BIN)/mypy

# The plan of the code in figures, beside its limits.  WHY=FIGURE lists the places behind one.
house:
	@$(FOUND) tools/house.py $(if $(WHY),--why $(WHY))

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site of docs/, in build/site, with the report of each bug of the gallery. (mkdocs-material's
# news of its successor is silenced: it reads the same mkdocs.yml, and has no mike to install yet.)
docs: .venv/docs
	@mkdir -p build
	$(BIN)/python tools/gallery.py > build/gallery.log
	$(BIN)/python tools/docs_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

screenshots: .venv/ready
	$(BIN)/python tools/screenshots.py

.venv/ready: pyproject.toml constraints.txt overrides.txt
	@echo "The interpreter is $(FOUND)."
	$(FOUND) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt \
		$(OVERRIDES_$(TORCH)) --editable '.[xla,joblib,slurm,team,dev]'
	PJRT_DEVICE=CPU $(BIN)/python -c 'import $(COMPILED)'
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch_xla") is None)' || \
		echo "Without torch_xla, which has wheels for Linux on x86_64 and Python up to 3.13 alone."
	$(BIN)/python -m compileall -q src
	touch $@

.venv/docs: .venv/ready
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[docs]'
	touch $@

.venv-native/ready: pyproject.toml constraints.txt
	$(FOUND) -m venv .venv-native
	.venv-native/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt torch==2.13.0 pytest pytest-timeout pytest-xdist --editable .
	touch $@

.venv-engines/ready: pyproject.toml constraints.txt tests/engines/overrides.txt
	$(FOUND) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt uv
	.venv-engines/bin/python -m uv pip install --quiet --python .venv-engines/bin/python \
		--constraint constraints.txt --overrides tests/engines/overrides.txt \
		--editable '.[engines]'
	touch $@

# Exact pins for everything but torch, its CUDA packages and torch_xla, which pyproject.toml pins, and
# what is AWS's own.
constraints:
	$(UV) pip compile --quiet --upgrade --no-emit-index-url --no-annotate --no-header \
		$(patsubst %,--extra %,xla joblib slurm team docs dev engines) --overrides overrides.txt \
		--overrides tests/engines/overrides.txt pyproject.toml --output-file constraints.new
	grep -vE '^(torch|torch-xla|triton|nvidia-.*|cuda-.*)==' constraints.new > constraints.txt
	$(BIN)/python -m pip freeze | grep '^uv==' >> constraints.txt
	rm constraints.new

clean:
	rm -rf .venv .venv-native .venv-engines build .mypy_cache .ruff_cache
