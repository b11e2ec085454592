# SPDX-License-Identifier: Apache-2.0
"""One connection, without a gateway."""
