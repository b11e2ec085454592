# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose: what is killed, stopped, cut off; what a history of every client says afterwards."""
