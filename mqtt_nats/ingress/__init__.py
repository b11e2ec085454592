# SPDX-License-Identifier: Apache-2.0
"""PUBLISH from a client or from the gateway: QoS 0, 1, 2, requests, scheduled and retained messages."""
