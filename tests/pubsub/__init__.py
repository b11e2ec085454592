# SPDX-License-Identifier: Apache-2.0
"""Who gets which message."""
