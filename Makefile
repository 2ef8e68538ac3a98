# The bump: from a clone to the five figures. `make` alone lists the targets.

PRESET ?= quick
ENV    ?= .venv
PYTHON ?= python3.11

# ENV=current uses the active environment as it is; anything else is a virtual environment that is made on first use.
ifeq ($(ENV),current)
  PY    := python
  BIN   :=
  READY :=
else
  PY    := $(ENV)/bin/python
  BIN   := $(ENV)/bin/
  READY := $(ENV)/.ready
endif

PRESETS := quick smoke cpu paper
ifeq ($(filter $(PRESET),$(PRESETS)),)
  $(error unknown preset '$(PRESET)'; known: $(PRESETS))
endif

# SEEDS="0 1" trains and measures these training seeds; results go to a folder of their own.
comma := ,
override SEEDS := $(sort $(subst $(comma), ,$(SEEDS)))
ifneq ($(filter-out 0 1 2 3 4 5 6 7 8 9,$(SEEDS)),)
  $(error SEEDS is '$(SEEDS)'; write training seeds from 0 to 9, such as SEEDS="0 1")
endif
ifneq ($(SEEDS),)
  empty    :=
  SUB      := /seeds-$(subst $(empty) ,-,$(SEEDS))
  LIST     := [$(subst $(empty) ,$(comma) ,$(SEEDS))]
  CHANGES  := , training_seeds=tuple($(LIST))
  KNOBS    := -y 'training_seeds: $(LIST)'
endif

FIGURES   := 1 2 3 4 5
OUT       := figures/$(PRESET)$(SUB)
DATA      := data/$(PRESET)$(SUB)
REFERENCE := data/reference/$(PRESET)
MODULES   := $(wildcard bump/*.py)
WEIGHTS   := $(wildcard data/checkpoints/*.safetensors data/checkpoints/$(PRESET)/*/*.safetensors)
PAPERMILL  = $(PY) -m papermill --cwd . -k python3 --log-output --no-progress-bar --log-level WARNING

COMMAND    = $(PY) -c 'from bump.runner import command;

export PYTHONPATH := $(CURDIR)
export SOURCE_DATE_EPOCH := 0
export MPLBACKEND := agg
# Two warnings of libraries about themselves, which would otherwise stand above every progress bar.
export PYTHONWARNINGS := ignore:IProgress not found,ignore:`torch.jit.script` is deprecated

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help env figures list check fetch train ship render reference export test smoke benchmark lab clean $(FIGURES:%=fig%)

help:
	@echo 'make figures   rebuild the whole paper: $(DATA)/fig*.nc and $(OUT)/fig*.{pdf,png,csv}'
	@echo 'make fig3      rebuild one figure'
	@echo 'make list      what a preset measures, and about how long it takes'
	@echo 'make check     what a preset lacks'
	@echo 'make fetch     download and verify what a preset lacks'
	@echo 'make render    draw the figures from the committed results; nothing is measured'
	@echo 'make reference make the working results of a preset the committed ones'
	@echo 'make train     train and attack the CIFAR-10 networks that are missing (PRESET=cpu or paper; needs CIFAR-10 in BUMP_DATA)'
	@echo 'make ship      copy the networks that quick measures from seed 0 of cpu'
	@echo 'make export    generate bump/ from the notebooks, and clean them'
	@echo 'make test      notebooks in step, their own tests, pytest, and a smoke run of all figures'
	@echo 'make smoke     the five figures at the smallest size'
	@echo 'make benchmark training against a plain loop, an adversarial step against its passes (CIFAR-10, an idle machine)'
	@echo 'make lab       JupyterLab in this environment'
	@echo 'make env       only make the environment'
	@echo 'make clean     delete the results of a preset (not the environment)'
	@echo
	@echo 'PRESET=quick (default), cpu, paper or smoke; ENV=.venv (default) or current; SEEDS="0 1": only these training seeds;'
	@echo 'RUNS="clean l2-1": train only these networks'

# --- environment ---------------------------------------------------------------------------------------------------

env: $(READY)

$(ENV)/.ready: requirements.txt pyproject.toml setup.py settings.ini
	@$(PYTHON) -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo 'Python 3.11 with its venv module is needed (Debian: python3.11-venv), as python3.11 or: make PYTHON=/path/to/python3.11'; exit 1; }
	$(PYTHON) -m venv $(ENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# --- figures -------------------------------------------------------------------------------------------------------

figures: $(OUT)/.inputs-are-there $(FIGURES:%=fig%) $(OUT)/deviation.txt
	@cat $(OUT)/deviation.txt

# Whatever any figure lacks is said before the first one starts.
$(OUT)/.inputs-are-there: $(MODULES) $(WEIGHTS) $(READY)
	@$(COMMAND) command("fetch", "$(PRESET)"$(CHANGES))'
	@mkdir -p $(OUT)
	@touch $@

$(FIGURES:%=fig%): fig%: $(OUT)/fig%.ipynb $(OUT)/fig%.png $(OUT)/fig%.pdf $(OUT)/fig%_claims.csv $(DATA)/fig%.nc

# One recipe makes all of a figure's files. The notebook appears under its own name only when all went well, and a
# failure takes the rest away. Measured cells stay in data/$(PRESET)/cells, so the next run continues from there.
$(OUT)/fig%.ipynb $(OUT)/fig%.png $(OUT)/fig%.pdf $(OUT)/fig%_claims.csv $(DATA)/fig%.nc: nbs/fig%.ipynb $(MODULES) $(WEIGHTS) $(READY)
	@mkdir -p $(OUT)
	@rm -f $(OUT)/fig$**.* $(DATA)/fig$*.nc
	@trap 'rm -f $(OUT)/fig$**.* $(DATA)/fig$*.nc' INT TERM; \
	  $(PAPERMILL) -p preset $(PRESET) $(KNOBS) $< $(OUT)/.fig$*.partial.ipynb \
	  || { rm -f $(OUT)/fig$**.* $(DATA)/fig$*.nc; echo "figure $* failed; see $(OUT)/.fig$*.partial.ipynb" >&2; exit 1; }
	@mv $(OUT)/.fig$*.partial.ipynb $(OUT)/fig$*.ipynb
	@touch $(OUT)/fig$*.png $(OUT)/fig$*.pdf $(OUT)/fig$*_claims.csv $(DATA)/fig$*.nc

$(OUT)/deviation.txt: $(FIGURES:%=$(DATA)/fig%.nc) $(wildcard $(REFERENCE)/fig*.nc)
	@$(PY) -c 'from bump.claims import report_deviation; print(report_deviation("$(PRESET)", "$(DATA)"))' > $@

render: $(READY)
	@for n in $(patsubst $(REFERENCE)/fig%.nc,%,$(wildcard $(REFERENCE)/fig?.nc)); do \
	  $(PAPERMILL) -p preset $(PRESET) -p reference True nbs/fig$$n.ipynb .fig$$n.partial.ipynb || exit 1; \
	  rm .fig$$n.partial.ipynb; echo "figures/reference/$(PRESET)/fig$$n"; done

# Figures that were not measured keep the reference they have.
reference: $(READY)
	@test -n '$(wildcard $(DATA)/fig?.nc)' || { echo 'no results in $(DATA); make figures PRESET=$(PRESET) measures them' >&2; exit 1; }
	@mkdir -p $(REFERENCE)
	@$(COMMAND) command("record", "$(PRESET)"$(CHANGES))'
	cp $(wildcard $(DATA)/fig?.nc) $(REFERENCE)
	@$(MAKE) --no-print-directory render

# --- plans, training -----------------------------------------------------------------------------------------------

list: $(READY)
	@$(COMMAND) command("list", "$(PRESET)"$(CHANGES))'

check: $(READY)
	@$(COMMAND) command("check", "$(PRESET)"$(CHANGES))'

fetch: $(READY)
	@$(COMMAND) command("fetch", "$(PRESET)"$(CHANGES))'

train: $(READY)
	@$(COMMAND) command("train", "$(PRESET)"$(CHANGES), only=tuple("$(RUNS)".split()))'

ship: $(READY)
	@$(COMMAND) command("ship")'

benchmark: $(READY)
	$(PY) benchmarks/training_speed.py --out benchmarks/training_speed.csv
	$(PY) benchmarks/adversarial_step.py --out benchmarks/adversarial_step.csv

# --- notebooks ------------------------------------------------------------------------------------------------------

export: $(READY)
	$(BIN)nbdev_export
	$(BIN)nbdev_clean

lab: $(READY)
	env -u MPLBACKEND $(PY) -m jupyterlab

# --- tests ---------------------------------------------------------------------------------------------------------

test: $(READY)
	$(PY) -m ruff check bump tests benchmarks data/recipe
	$(PY) tests/notebooks_in_step.py
	OMP_NUM_THREADS=1 $(BIN)nbdev_test --n_workers 2
	$(PY) -m pytest -q -rs tests
	$(MAKE) smoke

smoke:
	@$(MAKE) --no-print-directory clean figures PRESET=smoke SEEDS=

clean:
	rm -rf $(OUT) $(DATA)
