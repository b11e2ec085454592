# SPDX-License-Identifier: Apache-2.0
"""MQTT clients of the command line: ``mqtt-nats pub``, ``sub`` and ``request``; the load generator is in `load`."""
