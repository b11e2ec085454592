# SPDX-License-Identifier: Apache-2.0
# The base by its digest (deploy/images.toml), what is installed by its hash (deploy/locks, `make locks`).
FROM python:3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b AS build
WORKDIR /src
# The C compiler of this stage makes our compiled modules; Debian keeps no older versions, so none is named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY deploy/locks deploy/locks
# Wheels of all that is needed; of nkeys there is only the source, which the locked setuptools builds.
RUN pip install --no-cache-dir --require-hashes --only-binary :all: --requirement deploy/locks/build.txt \
    && pip wheel --no-cache-dir --require-hashes --no-deps --no-build-isolation --only-binary :all: --no-binary nkeys \
        --requirement deploy/locks/gateway.txt --wheel-dir /wheels
COPY . .
# An image without compiled modules is an error. The virtual environment has no pip of its own: what is in the image is what runs.
RUN MQTT_NATS_BUILD=compiled pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/mqtt-nats \
    && pip --python /opt/mqtt-nats/bin/python install --no-cache-dir --no-index --no-deps /wheels/*.whl

# Jobs of Spark, with its Java: docker build --target spark
FROM build AS build-spark
RUN pip wheel --no-cache-dir --require-hashes --no-deps --no-build-isolation --only-binary :all: \
        --no-binary nkeys,pyspark --requirement deploy/locks/spark.txt --wheel-dir /wheels-spark \
    && pip --python /opt/mqtt-nats/bin/python install --no-cache-dir --no-index --no-deps /wheels-spark/*.whl

FROM python:3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b AS spark
RUN useradd --system --uid 10001 --no-create-home mqtt-nats && install -d -o 10001 /archive
COPY --from=build-spark /opt/mqtt-nats /opt/mqtt-nats
USER 10001
VOLUME /archive
ENTRYPOINT ["/opt/mqtt-nats/bin/mqtt-nats", "spark"]

FROM python:3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b
LABEL org.opencontainers.image.title="mqtt-nats" \
      org.opencontainers.image.description="An MQTT gateway that keeps every durable fact in NATS JetStream" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home mqtt-nats
COPY --from=build /opt/mqtt-nats /opt/mqtt-nats
USER 10001
EXPOSE 8883
# It listens on its own loopback until it is told where to listen, and who may connect: docs/deploying.md.
ENV PATH=/opt/mqtt-nats/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT ["mqtt-nats"]
CMD ["serve"]
