# SPDX-License-Identifier: Apache-2.0
FROM python:3.13-slim AS build
WORKDIR /src
# The virtual environment has no pip of its own: what is in the image is what runs.
RUN python -m venv --without-pip /opt/mqtt-nats
COPY . .
# hadolint ignore=DL3013 # what is installed is here, and pyproject.toml says which versions it can use
RUN pip --python /opt/mqtt-nats/bin/python install --no-cache-dir '.[admin]'

# Jobs of Spark, with its Java: docker build --target spark
FROM build AS build-spark
# hadolint ignore=DL3013
RUN pip --python /opt/mqtt-nats/bin/python install --no-cache-dir '.[spark]'

FROM python:3.13-slim AS spark
RUN useradd --system --uid 10001 --no-create-home mqtt-nats && install -d -o 10001 /archive
COPY --from=build-spark /opt/mqtt-nats /opt/mqtt-nats
USER 10001
VOLUME /archive
ENTRYPOINT ["/opt/mqtt-nats/bin/mqtt-nats", "spark"]

FROM python:3.13-slim
LABEL org.opencontainers.image.title="mqtt-nats" \
      org.opencontainers.image.description="An MQTT gateway that keeps every durable fact in NATS JetStream" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home mqtt-nats
COPY --from=build /opt/mqtt-nats /opt/mqtt-nats
USER 10001
EXPOSE 1883
# It listens on its own loopback until it is told where to listen, and who may connect: docs/deploying.md.
ENV PATH=/opt/mqtt-nats/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT ["mqtt-nats"]
CMD ["serve"]
