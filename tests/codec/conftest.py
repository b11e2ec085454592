# SPDX-License-Identifier: Apache-2.0
"""Hypothesis without a clock: a busy machine is no failure. A failing example prints how to reproduce it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("codec", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("codec")
