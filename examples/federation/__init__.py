# SPDX-License-Identifier: Apache-2.0
"""Two cores that share topics: docs/federation.md."""
