# SPDX-License-Identifier: Apache-2.0
"""Counters, ``$SYS`` topics, presence, the service in NATS, messages in the log."""
