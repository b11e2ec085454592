# SPDX-License-Identifier: Apache-2.0
"""Errors that end the gateway, or another command; and what is said of those that do not."""

import asyncio
from pathlib import Path


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


def ends_task(error: BaseException) -> bool:
    """Whether this is the cancellation of the present task, and not of something else that it has waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


def describe(error: BaseException) -> str:
    """What kind of error it is and where it comes from. Its text is left out: it may quote a password."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    kind = type(error).__name__
    return kind if last is None else f"{kind} at {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
