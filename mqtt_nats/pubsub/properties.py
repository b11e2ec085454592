# SPDX-License-Identifier: Apache-2.0
"""Placeholder."""

from mqtt_nats.codec import Properties


def header_lines(properties: Properties) -> bytes:
    """x."""
    return b""


def ttl_line(properties: Properties) -> bytes:
    """x."""
    return b""


def body(properties: Properties) -> bytes:
    """x."""
    return b""


def from_headers(headers: bytes) -> tuple[bytes, int]:
    """x."""
    return b"", -1
