# SPDX-License-Identifier: Apache-2.0
FROM python:3.13-slim AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/mqtt-nats && /opt/mqtt-nats/bin/pip install --no-cache-dir .

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home mqtt-nats
COPY --from=build /opt/mqtt-nats /opt/mqtt-nats
USER 10001
EXPOSE 1883
ENV MQTT_NATS_LISTEN=0.0.0.0:1883
ENTRYPOINT ["/opt/mqtt-nats/bin/mqtt-nats"]
CMD ["serve"]
