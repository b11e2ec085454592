# SPDX-License-Identifier: Apache-2.0
"""Foundations: errors, logs, tasks, nats-server's clock, configuration files; rates, bans, admission."""
