# SPDX-License-Identifier: Apache-2.0
"""Name of the running build: pure Python, or compiled modules."""

from __future__ import annotations

from mqtt_nats.codec import decoder


def build() -> str:
    """Return ``compiled`` or ``pure Python``."""
    return "pure Python" if str(decoder.__file__).endswith(".py") else "compiled"
