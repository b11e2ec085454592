# SPDX-License-Identifier: Apache-2.0
"""Stored state of MQTT gateways in JetStream: stream definitions, record formats and typed stores.

The package needs a transport only (`mqtt_streams.api.JetStream`): no event loop, no NATS client library.
"""
