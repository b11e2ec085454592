# SPDX-License-Identifier: Apache-2.0
"""Programs that use a gateway; README.md says how to run them."""
