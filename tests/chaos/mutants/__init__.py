# SPDX-License-Identifier: Apache-2.0
"""Gateways that are broken on purpose, each in one way that the checker of histories has to notice.

``python -m tests.chaos.mutants.<name> serve ...`` takes the arguments of ``mqtt-nats``.
"""
