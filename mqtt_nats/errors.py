# SPDX-License-Identifier: Apache-2.0
"""Errors that end the gateway, or another command."""


class StartupError(Exception):
    """The gateway cannot start or go on, or a command cannot do its work.

    ``str()`` is one line that says what is wrong and what to do. The command line prints it and
    exits with status 1.
    """


def first_error(error: BaseException) -> BaseException:
    """The first of a group of errors, and of a group within it; else the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
