# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions: members of groups, and messages that are assigned to one of them."""
