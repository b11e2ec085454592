# SPDX-License-Identifier: Apache-2.0
"""The session state machines: sans-IO, driven by events, acting through the ports they are given."""
