# SPDX-License-Identifier: Apache-2.0
"""Inputs that nobody would send: for all code that reads them, guided by what they reach, and for a gateway.

``python -m tests.fuzz`` (`make fuzz`) is the long version, ``tests/fuzz/test_fuzz.py`` the short one;
``docs/internals/fuzzing.md`` has the targets and what must hold for each.
"""
