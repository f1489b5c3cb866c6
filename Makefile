# make train     installs into .venv, makes the default corpus, trains the tiny preset (ARGS="--max-steps 50" adds options)
# make test      every test that needs no GPU
# make test-gpu  the tests that need one
# In an environment that has everything already, run python train.py and pytest directly.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check

.PHONY: train test test-gpu

train: $(VENV)/.installed data/stdlib/meta.json
	$(RUN) train.py --preset tiny $(ARGS)

test: $(VENV)/.installed
	$(RUN) -m pytest -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.installed
	$(RUN) -m pytest -m gpu $(ARGS)

# Made once: `python data.py stdlib --force` makes it anew.
data/stdlib/meta.json: | $(VENV)/.installed
	$(RUN) data.py stdlib

# torch goes first where there is a GPU: Transformer Engine is built against the torch that is installed (requirements-gpu.txt).
$(VENV)/.installed: requirements.txt requirements-gpu.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo >&2 \
		'make: $(PYTHON) must be Python 3.10 or later; name one that is, for example: make train PYTHON=python3.12'; exit 2; }
	@echo 'Installing into $(VENV): once, some minutes.'
	@$(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),yes)
	@$(PIP) -r requirements.txt
	@$(PIP) --no-build-isolation -r requirements-gpu.txt
else
	@$(PIP) -r requirements.txt -c constraints.txt
endif
	@touch $@
