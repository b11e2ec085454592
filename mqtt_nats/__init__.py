# SPDX-License-Identifier: Apache-2.0
"""An MQTT gateway that keeps every durable fact in NATS JetStream."""

__version__ = "0.1.0"
