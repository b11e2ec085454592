# SPDX-License-Identifier: Apache-2.0
"""Which of the two builds runs: the sources, or the modules compiled from them."""

from __future__ import annotations

from mqtt_nats.codec import decoder


def build() -> str:
    """``compiled`` or ``pure Python``."""
    return "pure Python" if str(decoder.__file__).endswith(".py") else "compiled"
