"""What the service raises on purpose, and the one table that turns any error into an HTTP answer.

    TinyLoopError                    tinyloop.errors
    └── ServerError
        ├── AdmissionRejected        the predicted wait is longer than the request's SLO
        ├── QueueFullError           max_queue_depth requests are already waiting
        ├── RequestCancelled         somebody cancelled the request by its id while its caller was waiting
        ├── SchedulerShutdown        the scheduler takes no new work because it is shutting down
        │   └── SchedulerNotRunning  ... because it was never started, or has stopped
        └── EngineError              a fault inside the server; the log has the details under `error_id`

Knows status codes and error codes, but no web framework and no API's own error format.
"""

import logging
import math
import secrets
from dataclasses import dataclass

from tinyloop.errors import ContextOverflow, NeverFits, RequestError, TinyLoopError

log = logging.getLogger(__name__)


class ServerError(TinyLoopError):
    """Base of what the service itself raises. Messages are safe to send to a client."""


class AdmissionRejected(ServerError):
    """The request would wait longer than its SLO allows. `predicted_wait_ms` is in milliseconds."""

    def __init__(self, reason: str, predicted_wait_ms: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.predicted_wait_ms = predicted_wait_ms


class QueueFullError(ServerError):
    """As many requests are waiting as may wait."""


class RequestCancelled(ServerError):
    """The request was cancelled by its id, and not by its caller leaving."""


class SchedulerShutdown(ServerError):
    """The scheduler takes no new work."""


class SchedulerNotRunning(SchedulerShutdown):
    """There is no running dispatcher: not started yet, shut down, or ended by a fault."""


class EngineError(ServerError):
    """Something broke inside. `error_id` finds it in the log; the cause is `__cause__` and never goes to a client."""

    def __init__(self, error_id: str) -> None:
        super().__init__(f"internal error, id {error_id}")
        self.error_id = error_id

    @classmethod
    def hiding(cls, cause: BaseException, error_id: str) -> "EngineError":
        """One for each caller: a shared exception would collect the tracebacks of them all."""
        error = cls(error_id)
        error.__cause__ = cause
        return error


def log_fault(what: str, error: BaseException) -> str:
    """Log an internal error with its traceback; returns the id that callers are told."""
    error_id = secrets.token_hex(6)
    log.error("%s, id %s", what, error_id, exc_info=error)
    return error_id


@dataclass(frozen=True)
class HttpError:
    """An answer to be dressed by each API. `field` names the offending request field, if there is one."""

    status: int
    code: str
    message: str
    field: str | None = None
    retry_after_s: int | None = None


# Error, status, code for clients, and the reason that metrics show when it turns an arrival away. The first row that
# fits is taken, so the special cases stand above the general ones.
HTTP_ERRORS: tuple[tuple[type[BaseException], int, str, str], ...] = (
    (QueueFullError, 503, "queue_full", "queue_full"),
    (AdmissionRejected, 503, "slo_unattainable", "slo"),
    (SchedulerNotRunning, 503, "not_running", "not_running"),
    (SchedulerShutdown, 503, "draining", "draining"),
    (RequestCancelled, 409, "cancelled", "invalid"),
    (EngineError, 500, "internal_error", "internal"),
    (ContextOverflow, 400, "context_length_exceeded", "invalid"),
    (NeverFits, 400, "kv_budget_exceeded", "invalid"),
    (RequestError, 400, "invalid_request", "invalid"),
)


def http_error(error: BaseException) -> HttpError:
    """The answer for any error. What is not in the table is a fault of ours: its message stays inside."""
    for kind, status, code, _ in HTTP_ERRORS:
        if isinstance(error, kind):
            return HttpError(status, code, str(error), getattr(error, "field", None), _retry_after_s(error))
    return HttpError(500, "internal_error", "internal error")


def rejection_reason(error: BaseException) -> str:
    """The metrics' word for why somebody was turned away. A web framework's own refusal carries a `status_code`."""
    if 400 <= getattr(error, "status_code", 0) < 500:
        return "invalid"
    return next((reason for kind, _, _, reason in HTTP_ERRORS if isinstance(error, kind)), "internal")


def _retry_after_s(error: BaseException) -> int | None:
    if isinstance(error, AdmissionRejected):
        return max(1, math.ceil(error.predicted_wait_ms / 1000))
    return None
