# SPDX-License-Identifier: Apache-2.0
"""Publish and subscribe: filters, routes, delivery to members. Knows no packet identifiers and no sockets."""
