# SPDX-License-Identifier: Apache-2.0
"""Gateways of one version and of the next, side by side, and upgrades of what is stored."""
