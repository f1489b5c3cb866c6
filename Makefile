# make train      install into .venv, make the default corpus, train the tiny preset, print a sample
#                 (ARGS="--max-steps 50" adds options)
# make test       run every test that needs no GPU (ARGS="-k data" selects some)
# make lint       check style with ruff (settings in pyproject.toml)
# make test-gpu   run the tests that need a GPU
# make doctor     print what is installed, what works, and a fix for what does not
# make te         install Transformer Engine and, on Hopper and Blackwell, FlashAttention 4
# Where everything is installed already, run `python train.py` and `pytest` directly.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(HAS_GPU),constraints-gpu.txt,constraints.txt)
PIP := $(RUN) -m pip install --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: train known-run test test-gpu lint doctor te

train: known-run $(VENV)/.train data/stdlib/meta.json
	$(RUN) train.py --preset tiny $(ARGS)
	$(RUN) sample.py "$$(ls -dt out/tiny* | head -1)"

# Stops for options with which train.py writes another run than the newest out/tiny*.
OTHER_RUN := $(firstword $(filter --out-dir% --out_dir% --preset% --config%,$(ARGS)))
known-run:
	@$(if $(OTHER_RUN),$(error ARGS: $(OTHER_RUN): make train takes its sample from out/tiny; \
		leave it out, or run: $(RUN) train.py $(ARGS)))

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m "not gpu" $(ARGS)

lint: $(VENV)/.dev
	$(RUN) -m ruff check .

test-gpu: $(VENV)/.dev
	$(RUN) -m pytest -m gpu $(ARGS)

# Works with nothing installed: you need it most when installing failed.
doctor:
	$(if $(wildcard $(RUN)),$(RUN),$(PYTHON)) doctor.py $(ARGS)

te:
	$(RUN) doctor.py --install

# Made once; `python data.py stdlib --force` makes it again.
data/stdlib/meta.json: | $(VENV)/.train
	$(RUN) data.py stdlib

# With a GPU, torch is installed first: Transformer Engine is built against it (requirements-gpu.txt).
$(VENV)/.train: requirements.txt requirements-gpu.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo >&2 \
		'make: $(PYTHON) must be Python 3.10 or later; name one that is, for example: make train PYTHON=python3.12'; exit 2; }
	@echo 'Installing into $(VENV), once: 1.6 GB and some minutes, several GB more where PyTorch comes with CUDA.'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements.txt
	$(if $(HAS_GPU),$(RUN) doctor.py --install)
	@touch $@

$(VENV)/.dev: $(VENV)/.train requirements-dev.txt
	@echo 'Installing what the tests need: 1.2 GB more.'
	$(PIP) -r requirements-dev.txt
	@touch $@
