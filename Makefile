# Every target makes the environment .venv on its first run and reuses it afterwards.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: install demo test test-slow test-hf5 bench lint clean

install: $(VENV)/.installed

$(VENV)/.installed: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mpi,test]'
	touch $@

# Trains a GPT over four processes, stops, resumes from the middle, and prints a sample.
demo: install
	$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest -m "not slow and not gpu" tests

test-slow: install
	$(BIN)/python -m pytest -m "slow and not gpu" tests

# The Hugging Face tests with the newest transformers, in an environment of its own.
HF5 := .venv-hf5
HF_TESTS := tests/tp/test_plan.py tests/tp/test_plan_models.py tests/tp/test_hf.py tests/tp/test_hf_decoders.py \
	tests/tp/test_hf_encoders.py tests/tp/test_hf_t5.py tests/parity/test_hf.py \
	tests/examples/test_finetune_hf.py

test-hf5: $(HF5)/.installed
	$(HF5)/bin/python -m pytest -m "not slow and not gpu" $(HF_TESTS)

$(HF5)/.installed: setup.py constraints-hf5.txt
	test -x $(HF5)/bin/python || $(PYTHON) -m venv $(HF5)
	$(HF5)/bin/python -m pip install --quiet -c constraints-hf5.txt -e '.[mpi,test]'
	touch $@

# Speed and memory against what a user would pick instead; one row with `make bench ROW=1f1b`. See benchmarks/run.py.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.run $(if $(ROW),--row $(ROW)) $(if $(REPEATS),--repeats $(REPEATS)) \
		$(if $(ROUNDS),--rounds $(ROUNDS))

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mpi,bench]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) $(HF5) build *.egg-info .pytest_cache .mypy_cache .ruff_cache runs
