# SPDX-License-Identifier: Apache-2.0
"""Tests of ``mqtt_nats.client``."""
