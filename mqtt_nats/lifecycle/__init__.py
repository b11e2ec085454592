# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of sessions (claim, deadline, expiry, will, quotas, bans) and of gateways (lease, failover, readiness)."""
