# SPDX-License-Identifier: Apache-2.0
"""Answers to questions and orders over NATS."""
