# SPDX-License-Identifier: Apache-2.0
"""Side-by-side benchmark of MQTT brokers; independent of the gateway's own code."""
