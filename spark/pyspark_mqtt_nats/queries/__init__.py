# SPDX-License-Identifier: Apache-2.0
"""SQL over stored messages: views, the columns that a query needs, and its result as a table or a chart."""
