# SPDX-License-Identifier: Apache-2.0
"""Errors, log, tasks, the clock of nats-server, configuration files; counting: buckets, bans, admission."""
