# SPDX-License-Identifier: Apache-2.0
"""Ranges of a stream into Arrow record batches."""
