# SPDX-License-Identifier: Apache-2.0
# Needs Python 3.11 or newer and nothing else: `make run` and `make test` install the rest into .venv.

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint conformance chaos bench bench-full demo kill-archive fuzz clean

# nats-server and the gateway on 127.0.0.1:1883; Ctrl-C ends both. The shell hands its process over.
run: $(VENV)/.embedded
	@exec $(BIN)/mqtt-nats serve --embedded --data ./data

# Most tests wait for other processes, so several run at a time: JOBS=1 for one after the other.
JOBS ?= 3
test: $(VENV)/.test lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Which statements of the MQTT standards the code obeys, and which tests prove it; fails where one is missing.
conformance: $(BIN)/python
	@$(BIN)/python -m tests.conformance

# Real weather through MQTT, JetStream and Spark; prints daily figures and writes weather-daily.csv.
demo: $(VENV)/.demo
	$(BIN)/python -m examples.weather $(DEMO_ARGS)

# Twenty kills of driver, executors and nats-server while Spark archives; `make test` has three.
kill-archive: $(VENV)/.test
	$(BIN)/python -m pytest tests/spark/test_archive_kills.py -s --kills 20

# The long experiments with faults, most of them minutes long; CHAOS_ARGS="R1 R2" for some. `make test` has short ones.
chaos: $(VENV)/.test
	$(BIN)/python -m tests.chaos --long $(CHAOS_ARGS)

# Ten million mutated inputs through the codec, then a hundred thousand mutated packets for a gateway: some minutes.
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Every broker, and how cost grows with sessions, filters, connections, retained messages and payload: docs/growth.md.
bench-full: $(VENV)/.bench
	$(BIN)/python -m benchmarks --peers ours,nats,mosquitto,amqtt --rounds 5 $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.growth

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp per set of extras: nothing is installed again while pyproject.toml is the same.
$(VENV)/.embedded: EXTRAS = embedded
$(VENV)/.test: EXTRAS = test
$(VENV)/.bench: EXTRAS = test,bench
$(VENV)/.demo: EXTRAS = demo
$(VENV)/.embedded $(VENV)/.test $(VENV)/.bench $(VENV)/.demo: pyproject.toml $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "mqtt-nats needs Python 3.11 or newer; name it with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
