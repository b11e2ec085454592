# SPDX-License-Identifier: Apache-2.0
"""The authenticators that do input and output, or compute for long; they decide by :mod:`mqtt_nats.access`."""
