# SPDX-License-Identifier: Apache-2.0
"""The structure of the source: order of packages, sizes, owners of attributes."""
