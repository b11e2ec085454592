# SPDX-License-Identifier: Apache-2.0
"""Gateways of neighbouring versions, side by side."""
