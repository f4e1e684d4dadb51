# `make help` says what there is. Everything runs in .venv, which the first target makes.
#
#   PY=python3        use this interpreter as it is, and install nothing
#   ARGS="..."        passed on: make demo ARGS="--steps 50 --strategy shard_grad_op"

PYTHON ?= python3
PY ?= .venv/bin/python
INSTALLED := $(if $(filter .venv/%,$(PY)),.venv/installed)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all where test-core test-hf steps student grade hint mistake lab evidence \
        kit-check autograder lint matrix fuzz mutants \
        claims predictions scale tutorials bench bench-check bench-checkpoints validate versions \
        site notebooks test-site \
        wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 12

demo: $(INSTALLED)  ## train a small GPT, sharded; compare it with DDP (see ARGS="--help")
	@$(TYPED) $(PY) $(if $(STUDENT),-m tutorials.exercises.demo "$(STUDENT)",tutorials/train_gpt.py) $(ARGS)

QUIETLY := -W ignore
TYPED = MINIFSDP_TYPED="make $@"  # what the help of a program calls it
WORKERS := -n auto --dist loadgroup  # processes that tests are shared out among: tests/conftest.py
test: $(INSTALLED)  ## what every commit needs; one test: ARGS="tests/test_limiter.py -k name"
	@$(PY) -m pytest $(WORKERS) -m "not slow" $(ARGS)

test-all: $(INSTALLED)  ## every test that this machine can run; takes ARGS as well
	@$(PY) -m pytest $(WORKERS) $(ARGS)

where: $(INSTALLED)  ## GPUS=8: which tests such a machine would run on them; takes ARGS as well
	@$(PY) -m tests.where $(or $(GPUS),8) $(ARGS)

steps: $(INSTALLED)  ## the program that grows: all its steps in build/steps/, and their tests
	@$(PY) $(QUIETLY) -m tutorials.grow build build/steps
	@$(PY) -m pytest $(WORKERS) tests/test_steps.py $(ARGS)

test-core: $(INSTALLED)  ## the core's own tests: tests/core/, for minifsdp/core/ alone
	@$(PY) -m pytest $(WORKERS) tests/core $(ARGS)

test-hf: $(INSTALLED)  ## models of transformers and peft against DDP; installs both into .venv
	@$(if $(INSTALLED),$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[hf]")
	@$(PY) -m pytest $(WORKERS) tests/hf $(ARGS)

INSTALL_SITE = $(if $(INSTALLED),$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[site]")
site: $(INSTALLED)  ## build/site: the pages, the explorer and the API, with MkDocs in .venv
	@$(INSTALL_SITE)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --config-file tutorials/site/mkdocs.yml

notebooks: $(INSTALLED)  ## build/notebooks: pages 00 to 06 and 29, to change and to run
	@$(INSTALL_SITE)
	@$(PY) $(QUIETLY) tutorials/notebooks.py build/notebooks

test-site: $(INSTALLED)  ## the site in a browser (needs chromium), and the notebooks by running them
	@$(INSTALL_SITE)
	@$(PY) -m pytest $(WORKERS) tests/site tests/test_site.py $(ARGS)

student: $(INSTALLED)  ## OUT=~/my-fsdp: an FSDP to write from nothing, and the concept files
	@$(TYPED) $(PY) $(QUIETLY) -m tutorials.exercises.student "$(or $(OUT),$(HOME)/my-fsdp)"

grade: $(INSTALLED)  ## DIR=~/my-fsdp: what of it is right, and why not; EX=limiter.1 or TRACK=1: a part
	@$(TYPED) $(PY) $(QUIETLY) -m tutorials.exercises.grade "$(or $(DIR),$(HOME)/my-fsdp)" --exercise "$(EX)" --track "$(TRACK)" $(ARGS) || [ $$? = 1 ]

hint: N = 1
hint: $(INSTALLED)  ## EX=limiter.1: a hint; N=2 and N=3 say more
	@$(TYPED) $(PY) $(QUIETLY) -m tutorials.exercises.hint "$(EX)" $(N)

mistake: $(INSTALLED)  ## M=1 DIR=~/my-fsdp: one wrong line and what comes of it; find it
	@$(PY) $(QUIETLY) -m tutorials.exercises.mistakes "$(M)" "$(or $(DIR),$(HOME)/my-fsdp)" $(ARGS) || [ $$? = 1 ]

evidence: $(INSTALLED)  ## DIR=~/my-fsdp: that it holds on the GPUs that are here; writes evidence.json
	@$(PY) $(QUIETLY) -m tutorials.exercises.evidence "$(or $(DIR),$(HOME)/my-fsdp)" $(ARGS)

lab: $(INSTALLED)  ## DIR=~/my-fsdp: the figures of your labs; LAB=bytes_limiter: one lab
	@$(PY) $(QUIETLY) -m tutorials.exercises.lab "$(or $(DIR),$(HOME)/my-fsdp)" --lab "$(LAB)" $(ARGS) || [ $$? = 1 ]

kit-check: $(INSTALLED)  ## whether the exercises can be done, and mistakes in them are found
	@$(PY) $(QUIETLY) -m tutorials.exercises.kit_check

autograder: $(INSTALLED)  ## dist/autograder.zip, for Gradescope
	@$(PY) $(QUIETLY) -m tutorials.exercises.autograder dist/autograder.zip

lint: $(INSTALLED)  ## ruff, and mypy --strict on the package
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

matrix: $(INSTALLED)  ## how far all combinations are from DDP; ARGS="--pretended-gpu": as on GPUs
	@$(PY) -m tests.matrix $(ARGS)

mutants: $(INSTALLED)  ## break each concept on purpose; its tests have to notice
	@$(PY) -m tests.mutants $(ARGS)

N ?= 1000
fuzz: $(INSTALLED)  ## N=10000: that many random models with random settings, against plain ones
	@$(PY) $(QUIETLY) -m tests.fuzz $(N) $(ARGS)

claims: $(INSTALLED)  ## what others have measured, on the virtual GPU: minifsdp/sim/README.md
	@$(PY) -W ignore::UserWarning -m tests.claims

predictions: $(INSTALLED)  ## published training runs, and what the virtual GPU says of them
	@$(PY) -W ignore::UserWarning -m tests.predictions

scale: $(INSTALLED)  ## from 8 GPUs to 4,096, beside FSDP1's and FSDP2's schedules
	@$(PY) -W ignore::UserWarning -m tests.scale

tutorials: $(INSTALLED)  ## the pages in tutorials/, by running them
	@$(PY) tutorials/build.py $(ARGS)
	@$(if $(ARGS),,for made in front explorer calculator; do $(PY) -W ignore tutorials/$$made.py || exit; done)

bench: $(INSTALLED)  ## against torch's DDP, FSDP1 and FSDP2, as ratios; see ARGS="--help"
	@$(PY) $(QUIETLY) -m tests.bench.engine $(ARGS)

bench-check: $(INSTALLED)  ## whether the ratios are within their bounds on this machine
	@$(PY) $(QUIETLY) -m tests.bench.check

bench-checkpoints: $(INSTALLED)  ## saving and loading, against torch's fully_shard
	@$(PY) -m tests.bench.checkpoints $(ARGS)

validate: $(INSTALLED)  ## the virtual GPU against the real one that is here, or against the CPUs
	@$(PY) -m tests.bench.gpu

versions:  ## the fast tests on each Python and each torch that can be had; see ARGS="--help"
	@$(PYTHON) tests/versions.py $(ARGS)

wheel: $(INSTALLED)  ## dist/minifsdp-*.whl
	@$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove what the other targets made
	rm -rf .venv .versions build dist *.egg-info .expected .pytest_cache .mypy_cache .ruff_cache

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "minifsdp needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv .venv || { echo "could not make .venv; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@.venv/bin/python tests/install.py
	@touch $@
