# SPDX-License-Identifier: Apache-2.0
"""A blocking NATS client for one task: a connection, and requests to JetStream."""
