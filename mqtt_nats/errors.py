# SPDX-License-Identifier: Apache-2.0
"""Errors that end the gateway."""


class StartupError(Exception):
    """The gateway cannot start, or cannot go on.

    ``str()`` is one line that says what is wrong and what to do. The command line prints it and
    exits with status 1.
    """
