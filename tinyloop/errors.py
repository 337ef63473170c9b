"""Everything TinyLoop raises on purpose.

    TinyLoopError
    ├── CheckpointError      a model cannot be loaded: unknown family, missing tensor, truncated file, failed fetch
    └── RequestError         the caller asked for something that cannot be done; names the field and the bound
        ├── ContextOverflow  prompt + max_new_tokens is longer than the model's context
        └── NeverFits        the KV budget could not hold the request even with nothing else running

A message of a RequestError is written for the caller and safe to send over HTTP.
"""


class TinyLoopError(Exception):
    """Base of every error that TinyLoop raises on purpose."""


class CheckpointError(TinyLoopError):
    """A checkpoint cannot be found, fetched, read or understood. The message names the file, tensor or flag."""


class RequestError(TinyLoopError, ValueError):
    """The request is wrong. `field` is the name of the offending field as the caller knows it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ContextOverflow(RequestError):
    """Prompt and requested tokens together exceed the context length."""


class NeverFits(RequestError):
    """The request needs more KV pages than the whole budget has."""
