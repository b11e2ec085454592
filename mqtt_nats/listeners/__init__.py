# SPDX-License-Identifier: Apache-2.0
"""Accepting connections."""
