# SPDX-License-Identifier: Apache-2.0
"""Tests of limits, bans, and who may connect from where."""
