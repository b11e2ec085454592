# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats ctl`` against two gateway processes on one nats-server."""
