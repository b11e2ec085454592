# SPDX-License-Identifier: Apache-2.0
"""The gateway beside nats-server's own MQTT listener, on one account."""
