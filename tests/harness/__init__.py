# SPDX-License-Identifier: Apache-2.0
"""Servers, gateways and waiting, for every test that needs them."""
