# SPDX-License-Identifier: Apache-2.0
"""Errors that end the gateway or a command, and texts of errors for logs and answers."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LIST: Final = frozenset({"list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"})
TABLE: Final = frozenset({"dict_type", "mapping_type", "model_type", "model_attributes_type"})
"""Error types of pydantic for a missing dictionary; their texts, as the texts of `LIST`, name Python types."""

_TOO_SHORT: Final = re.compile(r"Value should have at least (\d+) items after validation, not (\d+)")
"""Text of pydantic for a secret that is too short."""


class StartupError(Exception):
    """The gateway cannot start or continue, or a command cannot do its work.

    Each argument is one line with an error and the remedy; ``str()`` has all in one line. The command line prints the
    lines and exits with status 1.
    """

    def __str__(self) -> str:
        """Return all errors in one line."""
        return "; ".join(self.problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """The errors, one line each."""
        return self.args


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a group, also of nested groups; else the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def ends_task(error: BaseException) -> bool:
    """Whether an error is the cancellation of the present task, and not of a task or future that it has awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


def worded(detail: Mapping[str, object], table: str = "a table") -> str:
    """Return the text of a pydantic error in the terms of the file; ``table``: the file's word for a dictionary."""
    kind = detail["type"]
    if kind in LIST or kind in TABLE:
        return f"input should be {'a list' if kind in LIST else table}"
    if kind == "too_short" and (found := _TOO_SHORT.fullmatch(str(detail["msg"]))):
        return f"needs {found[1]} characters or more, and has {found[2]}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def describe(error: BaseException) -> str:
    """Return type and place of an error. Its text is left out because it may quote a password."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    kind = type(error).__name__
    return kind if last is None else f"{kind} at {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
