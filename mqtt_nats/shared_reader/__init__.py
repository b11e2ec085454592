# SPDX-License-Identifier: Apache-2.0
"""The gateway's one reader of stored messages, and sessions that catch up to it."""
