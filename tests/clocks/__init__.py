# SPDX-License-Identifier: Apache-2.0
"""Gateways on machines whose clocks are wrong."""
