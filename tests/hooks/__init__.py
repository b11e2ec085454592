# SPDX-License-Identifier: Apache-2.0
"""Hooks: the chains, and what the gateway does with them."""
