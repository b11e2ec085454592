# SPDX-License-Identifier: Apache-2.0
"""Plugins: how they are loaded, and those that come with the gateway."""
