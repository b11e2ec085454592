# SPDX-License-Identifier: Apache-2.0
"""Name of the running build: pure Python, or compiled modules."""

from __future__ import annotations


def build() -> str:
    """Return ``compiled`` or ``pure Python``."""
    from mqtt_nats.codec import decoder  # most commands need no codec

    return "pure Python" if str(decoder.__file__).endswith(".py") else "compiled"
