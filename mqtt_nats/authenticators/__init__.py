# SPDX-License-Identifier: Apache-2.0
"""Authenticators with input and output or long computations; their decisions are made in :mod:`mqtt_nats.access`."""
