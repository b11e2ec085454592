# SPDX-License-Identifier: Apache-2.0
# Needs Python 3.11 or newer and nothing else: `make run` and `make test` install the rest into .venv.

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV := .venv
# Tests start hundreds of gateways; each would compile its modules again where the environment forbids to keep them.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
# A copy of the sources with compiled modules.
COPY := $(CURDIR)/build/compiled
COPIED := PYTHONPATH=$(COPY):$(COPY)/streams:$(COPY)/spark

.PHONY: run test-unit test test-short test-all test-both test-long test-records test-soak test-compiled wheels lint conformance chaos bench bench-quick bench-full bench-check growth profile report demo kill-spark clients fuzz reference docs locks clean

# nats-server and the gateway on 127.0.0.1:1883, with the dashboard at the address that is printed; Ctrl-C ends all. The shell hands its process over.
# The first start runs the sources, and compiles them for the next one where there is a C compiler; MQTT_NATS_BUILD=pure runs the sources.
run: $(VENV)/.run
	@exec $(BIN)/python hatch_build.py run $(COPY) serve --embedded --data ./data

# Most tests wait for other processes, so several run at a time: JOBS=1 for one after the other.
JOBS ?= 4
# These compute all the time.
UNIT_JOBS ?= auto
FILES := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# What every change needs: at most ten minutes on two cores. ruff and mypy run beside the tests; one of them that fails does not stop the others.
test: $(VENV)/.test
	+@$(MAKE) --no-print-directory --keep-going --jobs=2 lint test-short

test-short: $(VENV)/.bytecode
	$(BIN)/python -m pytest $(FILES) -m "not long and not soak" $(PYTEST_ARGS)

# The rest of what CI runs. tests/harness/durations.py says which tests these are.
test-long: $(VENV)/.bytecode
	$(BIN)/python -m pytest $(FILES) -m "long and not soak" $(PYTEST_ARGS)

# What CI runs: both parts at once, so that no process is idle at the end of the first, and one Spark session serves all.
test-all: $(VENV)/.test
	+@$(MAKE) --no-print-directory --keep-going --jobs=2 lint test-both

test-both: $(VENV)/.bytecode
	$(BIN)/python -m pytest $(FILES) -m "not soak" $(PYTEST_ARGS)

# Tests of sessions once more, where positions of sessions are in records and sessions have no consumers.
test-records: $(VENV)/.test
	MQTT_NATS_SESSION_POSITIONS=records \
		$(BIN)/python -m pytest $(FILES) -m "not long and not soak and not consumers" $(PYTEST_ARGS) \
		$(addprefix tests/,crash delivery integration lifecycle sessions v5)

# Tests that start no process: no nats-server, no gateway, no other program. A test that starts one fails.
test-unit: $(VENV)/.test
	$(BIN)/python -m pytest --unit -n $(UNIT_JOBS) --dist worksteal $(PYTEST_ARGS)

# What takes minutes of CPU each: jobs of Spark while everything is killed, a Spark cluster. CI does not run it.
test-soak: $(VENV)/.test
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

# The tests of both, `make test` and `make test-long`, with the compiled modules, in a copy of the sources; needs a C compiler. The fuzzer is
# guided by the lines that run, which compiled code does not tell, and a wheel of the sources is made of sources.
.PHONY: compiled
compiled: $(VENV)/.run
	$(BIN)/python hatch_build.py copy $(COPY)

test-compiled: $(VENV)/.test compiled
	cd $(COPY) && $(COPIED) \
		$(CURDIR)/$(BIN)/python -m pytest $(FILES) -m "not soak and not sources" \
		$(addprefix --ignore tests/,fuzz test_packaging.py) $(PYTEST_ARGS)

# Into dist/: the wheel for every platform, and a compiled one for each CPython 3.11 to 3.14 that is on PATH; pip prefers a
# compiled one where it fits. PYTHONS='python3.12 /opt/python/bin/python3.13' for others.
wheels: $(VENV)/.wheels
	$(BIN)/python -m scripts.wheels dist $(PYTHONS)

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

# Twenty kills of driver, workers and nats-server while a streaming query, aggregate, rules and archives run; `make test-soak`
# has four. KIND=stream, aggregate, rule, archive, parquet, delta or iceberg for some.
KILLS ?= 20
kill-spark: $(VENV)/.test
	$(BIN)/python -m pytest tests/spark/test_query_kills.py tests/spark/test_archive_kills.py -s --kills $(KILLS) -k "$(KIND)"

# The long experiments with faults, most of them minutes long; CHAOS_ARGS="R1 R2" for some. `make test-long` has short ones.
chaos: $(VENV)/.test
	$(BIN)/python -m tests.chaos --long $(CHAOS_ARGS)

# Clients that people use, in six languages, as far as they can be had here; writes the table of docs/compatibility.md.
# CLIENTS_ARGS='MQTT.js' for some of them.
clients: $(VENV)/.test
	$(BIN)/python -m tests.clients --report docs/compatibility.md $(CLIENTS_ARGS)

# Mutated inputs for all code that reads what strangers write, ten minutes per target and processor, then a hundred
# thousand mutated packets for a gateway: docs/internals/fuzzing.md. FUZZ_ARGS='proxy --seconds 60' for some of it.
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

# What is measured: the compiled build where there is a C compiler, as pip takes it where its wheel is; or BUILD=pure.
BUILD ?= $(if $(shell command -v cc),compiled,pure)
ifeq ($(BUILD),compiled)
OURS := --ours "env $(COPIED) $(CURDIR)/$(BIN)/python -P -m mqtt_nats serve --nats nats://{host}:{nats} --listen {host}:{mqtt} --max-inflight 1024"
BUILT := compiled
endif

# The table of targets, beside nats-server's own listener and mosquitto: docs/benchmarks.md, in less than 20 minutes.
bench: $(VENV)/.bench $(BUILT)
	$(BIN)/python -m benchmarks $(OURS) --table --rounds 5 --seconds 0.8 --warmup 0.2 \
		--title "Beside nats-server's own listener and mosquitto" \
		--report docs/benchmarks.md --ratios docs/benchmarks.json $(BENCH_ARGS)

# The figures of the README's table, beside nats-server's own listener and mosquitto, in three to five minutes. The first time it
# installs and compiles before. BENCH_ARGS='--figures docs/bench-quick.json' and `make reference` put them into the README.
bench-quick: $(VENV)/.run $(BUILT)
	$(BIN)/python -m benchmarks $(OURS) --quick --rounds 3 --seconds 0.7 --warmup 0.3 $(BENCH_ARGS)

# Ratios of `make bench` in three minutes; fails where one is worse than in docs/benchmarks.json by more than the spread explains.
bench-check: $(VENV)/.bench $(BUILT)
	$(BIN)/python -m benchmarks $(OURS) --check docs/benchmarks.json --rounds 3 --seconds 0.7 --warmup 0.3 $(BENCH_ARGS)

# The curves and tables of docs/growth.md; GROWTH_ARGS='--only durable' for one curve.
growth: $(VENV)/.bench $(BUILT)
	$(BIN)/python -m benchmarks.growth $(OURS) --rounds 3 --seconds 1 $(GROWTH_ARGS)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.gateways --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.gateways --stubs --gateways 1,100,500,1000 --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.claims --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.reading --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.listing --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.slow $(OURS) --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.positions $(OURS) --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.consumer_moves --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.absent $(OURS) --report docs/growth.md)
	$(if $(GROWTH_ARGS),,$(BIN)/python -m benchmarks.mass expiry killed rolling --report docs/growth.md)
	$(BIN)/python -m benchmarks.matching --docs docs

# Every broker that is here; hooks; how cost grows with sessions, filters, connections, retained messages and payload; sizes.
bench-full: $(VENV)/.bench
	$(MAKE) bench; test $$? -le 2
	test -d $(VENV)/aedes || npm install --silent --prefix $(VENV)/aedes aedes || true
	$(BIN)/python -m benchmarks $(OURS) --table --peers ours,nats,mosquitto,aedes,amqtt,emqx --rounds 3 --seconds 1 \
		--warmup 0.3 --report docs/benchmarks.md --part brokers --title 'Beside every broker'; test $$? -le 1
	$(BIN)/python -m benchmarks --peers ours,hooks-elsewhere,hooks --only 'pairs10-q[01],pairs500-q0,fanout100-q0' --rounds 5 \
		--seconds 1 --report docs/benchmarks.md --part hooks --title 'With hooks'; test $$? -le 1
	$(MAKE) growth; test $$? -le 2
	$(BIN)/python -m benchmarks.sizing --report docs/sizing.md

# A flame graph of the gateway in each main scenario, and what takes the time: docs/profiles.md.
profile: $(VENV)/.bench
	$(BIN)/python -m benchmarks.profile $(PROFILE_ARGS)

# Figures of the source and of its walks, beside those of yesterday; REPORT_ARGS='--since REVISION --no-walks'. No test compares them.
report: $(VENV)/.test
	@$(BIN)/python -m scripts.report $(REPORT_ARGS)

# The tables of docs/configuration.md, docs/reason-codes.md and docs/streams.md, from the models and the code.
reference: $(VENV)/.test
	$(BIN)/python -m scripts.reference

# The documentation as a site in build/site; a link that leads nowhere fails.
docs: $(VENV)/.docs
	$(BIN)/python -m zensical build --strict

# What images install, with hashes, in deploy/locks; again whenever pyproject.toml asks for something else, and with
# LOCK_ARGS=--upgrade for what has come out since. setuptools builds what comes as source only, mypy compiles our modules.
LOCK := $(BIN)/python -m uv pip compile --quiet --universal --python-version 3.13 --generate-hashes --no-annotate --no-header $(LOCK_ARGS)
BUILD_REQUIRES := import tomllib; found = tomllib.load(open("pyproject.toml", "rb")); \
	hook = found["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]; \
	print(*found["build-system"]["requires"], *hook["dependencies"], sep="\n")
locks: $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
	$(BIN)/python -c '$(BUILD_REQUIRES)' | $(LOCK) - --output-file deploy/locks/build.txt
	$(LOCK) pyproject.toml --extra admin --output-file deploy/locks/gateway.txt
	$(LOCK) pyproject.toml --extra admin --extra spark --constraint deploy/locks/gateway.txt --output-file deploy/locks/spark.txt

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp per set of extras: nothing is installed again while pyproject.toml is the same.
$(VENV)/.run: EXTRAS = embedded,admin,compile
$(VENV)/.test: EXTRAS = test
$(VENV)/.bench: EXTRAS = test,bench
$(VENV)/.demo: EXTRAS = demo
$(VENV)/.docs: EXTRAS = docs
$(VENV)/.wheels: EXTRAS = wheels
$(VENV)/.run $(VENV)/.test $(VENV)/.bench $(VENV)/.demo $(VENV)/.docs $(VENV)/.wheels: pyproject.toml $(BIN)/python
	@echo 'Installing into $(VENV). The first time this takes about a minute.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

# Loads all tests once, before several processes do: each would compile all of them.
$(VENV)/.bytecode: $(VENV)/.test
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "mqtt-nats needs Python 3.11 or newer; name it with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
