# SPDX-License-Identifier: Apache-2.0
"""What an MQTT gateway keeps in JetStream: stream definitions, record formats and typed stores.

Needs a transport only (`mqtt_streams.api.JetStream`): no event loop, no NATS client library.
"""
