# SPDX-License-Identifier: Apache-2.0
"""Retained messages: stored, removed, withheld after an outage, sent for a new subscription."""
