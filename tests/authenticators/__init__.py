# SPDX-License-Identifier: Apache-2.0
"""Authenticators, without a gateway."""
