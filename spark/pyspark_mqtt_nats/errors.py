# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the source and the sink; each names the option that a user would change.

    OptionError (a ValueError)   an option is wrong in itself
    SourceError                  an error that shows only when the server is used
      ConnectError               no connection, or it was lost
      AccessError                the NATS user has no permission
      ApiError                   JetStream refused a request
      RequestTimeout             no answer in time: whether the request was carried out is unknown
      DataLossError              messages of the range to read are gone

The text is one line and names the option; `option` is the option's name alone, "" where no option would help. No text
contains a secret.
"""


class OptionError(ValueError):
    """An option that cannot be used."""

    def __init__(self, text: str, option: str = "") -> None:
        super().__init__(text)
        self.option = option


class SourceError(Exception):
    """Reading from NATS or writing to NATS failed."""

    def __init__(self, text: str, option: str = "") -> None:
        super().__init__(text)
        self.option = option


class ConnectError(SourceError):
    """The connection to NATS cannot be made, or was lost."""


class AccessError(SourceError):
    """The NATS user has no permission for a subject."""


class ApiError(SourceError):
    """JetStream refused a request: HTTP-like `code`, JetStream's `err_code` (0 for none) and its text."""

    def __init__(self, text: str, option: str = "", code: int = 500, err_code: int = 0, description: str = "") -> None:
        super().__init__(text, option)
        self.code = code
        self.err_code = err_code
        self.description = description


class RequestTimeout(SourceError):
    """No answer in time: whether the request was carried out is unknown."""


class DataLossError(SourceError):
    """Messages of the range that was to be read are gone."""
