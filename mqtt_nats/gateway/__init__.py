# SPDX-License-Identifier: Apache-2.0
"""Composition: accounts, start, reconnect, end, workers, the embedded nats-server."""
