# SPDX-License-Identifier: Apache-2.0
"""Inputs that nobody would send: through the codec, guided by what they reach in it, and against a gateway.

``python -m tests.fuzz`` (`make fuzz`) is the long version, ``tests/fuzz/test_fuzz.py`` the short one.
"""
