# make train      install into .venv, make the default corpus, train the tiny preset (ARGS="--max-steps 50" adds
#                 options)
# make test       run every test that needs no GPU (ARGS="-k data" selects some)
# make lint       check style with ruff (settings in pyproject.toml)
# make test-gpu   run the tests that need a GPU
# make doctor     print what is installed, what works, and a fix for what does not
# make te         install Transformer Engine and, on Hopper and Blackwell, FlashAttention 4
# make benchmark  measure the speed and memory in results/ on this GPU, then draw the pictures and write the tables and
#                 figures of the pages (ARGS="--shapes 124m-b32": the speed of one shape only)
# Where everything is installed already, run `python train.py` and `pytest` directly.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check

.PHONY: train test test-gpu lint doctor te benchmark

train: $(VENV)/.installed data/stdlib/meta.json
	$(RUN) train.py --preset tiny $(ARGS)

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 -m "not gpu" $(ARGS)

lint: $(VENV)/.installed
	$(RUN) -m ruff check .

test-gpu: $(VENV)/.installed
	$(RUN) -m pytest -m gpu $(ARGS)

# Works with nothing installed: you need it most when installing failed.
doctor:
	$(if $(wildcard $(RUN)),$(RUN),$(PYTHON)) doctor.py $(ARGS)

te:
	$(RUN) doctor.py --install

benchmark: $(VENV)/.installed data/stdlib/meta.json
	$(RUN) benchmark_te.py --shapes all --json results/speed.json $(ARGS)
ifeq ($(ARGS),)
	$(RUN) benchmark_te.py --json results/formats.json
	$(RUN) benchmark_te.py --stack --json results/stack.json
	$(RUN) benchmark_te.py --sweep --json results/crossover.json --time-budget 1000
	$(RUN) benchmark_te.py --compile --json results/compile.json --time-budget 1000
	$(RUN) benchmark_attention.py --json results/attention.json
	$(RUN) bench/optimizer.py --json results/optimizer.json
	$(RUN) bench/own_loop.py --json results/own_loop.json
	$(RUN) bench/memory.py --json results/memory.json
	$(RUN) bench/gqa_rmsnorm.py --json results/gqa_rmsnorm.json
	$(RUN) bench/accumulation.py
	$(RUN) bench/training.py
endif
	$(RUN) bench/pages.py

# Made once; `python data.py stdlib --force` makes it again.
data/stdlib/meta.json: | $(VENV)/.installed
	$(RUN) data.py stdlib

# With a GPU, torch is installed first: Transformer Engine is built against it (requirements-gpu.txt).
$(VENV)/.installed: requirements.txt requirements-gpu.txt constraints.txt constraints-gpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo >&2 \
		'make: $(PYTHON) must be Python 3.10 or later; name one that is, for example: make train PYTHON=python3.12'; exit 2; }
	@echo 'Installing into $(VENV): once, some minutes.'
	@$(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),yes)
	@$(PIP) -r requirements.txt -c constraints-gpu.txt
	@$(RUN) doctor.py --install
else
	@$(PIP) -r requirements.txt -c constraints.txt
endif
	@touch $@
