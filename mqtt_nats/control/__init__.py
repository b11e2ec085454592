# SPDX-License-Identifier: Apache-2.0
"""Answers of a gateway to questions and requests of administrators over NATS."""
