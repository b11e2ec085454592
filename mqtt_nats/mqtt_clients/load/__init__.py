# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats bench``: MQTT clients that measure a broker, whichever it is. Nothing here is of the gateway."""
