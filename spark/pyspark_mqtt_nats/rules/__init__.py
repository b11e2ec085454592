# SPDX-License-Identifier: Apache-2.0
"""Rules: SQL over stored messages whose results are published, one streaming query for each rule."""
