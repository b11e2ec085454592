# SPDX-License-Identifier: Apache-2.0
"""The session state machines, without sockets, clocks or NATS."""
