# SPDX-License-Identifier: Apache-2.0
"""Rows as MQTT messages: checked, encoded as a gateway encodes them, published until NATS has acknowledged them."""
