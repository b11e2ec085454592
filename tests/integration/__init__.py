# SPDX-License-Identifier: Apache-2.0
"""The gateway with real clients on a real nats-server."""
