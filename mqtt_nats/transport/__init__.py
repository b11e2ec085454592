# SPDX-License-Identifier: Apache-2.0
"""A client's socket: TCP, TLS, WebSocket, PROXY protocol, reads, writes, rates, listeners."""
