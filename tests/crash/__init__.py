# SPDX-License-Identifier: Apache-2.0
"""What survives when processes are killed."""
