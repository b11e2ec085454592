# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, each with the option that a user would change.

    OptionError (a ValueError)   an option is wrong in itself
    SourceError                  everything that needs the server to be found out
      ConnectError               no connection, or it was lost
      AccessError                the NATS user may not do this
      ApiError                   JetStream refused a request
      RequestTimeout             no answer in time: whether the request was carried out is unknown
      DataLossError              messages that should be there are gone

The text is one line and names the option; `option` is its name alone, "" where none would help. No text has a secret.
"""


class OptionError(ValueError):
    """An option that cannot be used."""

    def __init__(self, text: str, option: str = "") -> None:
        super().__init__(text)
        self.option = option


class SourceError(Exception):
    """Reading or writing the stored messages failed."""

    def __init__(self, text: str, option: str = "") -> None:
        super().__init__(text)
        self.option = option


class ConnectError(SourceError):
    """There is no connection to NATS, or it was lost."""


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
