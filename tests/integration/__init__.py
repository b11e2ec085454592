# SPDX-License-Identifier: Apache-2.0
"""The gateway with real clients on a real nats-server. Ids like [MQTT-3.1.2-4] are of MQTT 3.1.1."""
