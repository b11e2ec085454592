# SPDX-License-Identifier: Apache-2.0
"""Tests. They run against real nats-server processes on 127.0.0.1."""
