# SPDX-License-Identifier: Apache-2.0
"""Observability: counters, ``$SYS`` topics, presence, NATS micro service, message log."""
