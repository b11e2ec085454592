# SPDX-License-Identifier: Apache-2.0
"""End of a session: deadline, expiry, will, timers; leases, failover and readiness of gateways."""
