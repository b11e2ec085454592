# SPDX-License-Identifier: Apache-2.0
"""Errors that end the gateway, or another command; and what is said of those that do not."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LIST: Final = frozenset({"list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"})
TABLE: Final = frozenset({"dict_type", "mapping_type", "model_type", "model_attributes_type"})
"""Kinds of errors of pydantic, whose texts have names of Python's types."""


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


def worded(detail: Mapping[str, object], table: str = "a table") -> str:
    """What pydantic has found, as those know it who write files; ``table``: what a dictionary is called there."""
    kind = detail["type"]
    if kind in LIST or kind in TABLE:
        return f"input should be {'a list' if kind in LIST else table}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def describe(error: BaseException) -> str:
    """What kind of error it is and where it comes from. Its text is left out: it may quote a password."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    kind = type(error).__name__
    return kind if last is None else f"{kind} at {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
