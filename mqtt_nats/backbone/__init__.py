# SPDX-License-Identifier: Apache-2.0
"""NATS: the connections, requests, and stores that must be acknowledged. Knows no MQTT packets."""
