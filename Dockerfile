# SPDX-License-Identifier: Apache-2.0
FROM python:3.13-slim AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/mqtt-nats && /opt/mqtt-nats/bin/pip install --no-cache-dir .

# Jobs of Spark, with its Java: docker build --target spark
FROM build AS build-spark
RUN /opt/mqtt-nats/bin/pip install --no-cache-dir '.[spark]'

FROM python:3.13-slim AS spark
RUN useradd --system --uid 10001 --no-create-home mqtt-nats && install -d -o 10001 /archive
COPY --from=build-spark /opt/mqtt-nats /opt/mqtt-nats
USER 10001
VOLUME /archive
ENTRYPOINT ["/opt/mqtt-nats/bin/mqtt-nats", "spark"]

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home mqtt-nats
COPY --from=build /opt/mqtt-nats /opt/mqtt-nats
USER 10001
EXPOSE 1883
# It does not start before it is told who may connect: docs/authentication.md.
ENV MQTT_NATS_LISTEN=0.0.0.0:1883
ENTRYPOINT ["/opt/mqtt-nats/bin/mqtt-nats"]
CMD ["serve"]
