# SPDX-License-Identifier: Apache-2.0
"""Attacks on a gateway: other clients go on, and memory and processor time stay bounded."""
