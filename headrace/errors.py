"""The exception tree. Strangers (clients, files) get one of these; ourselves get asserts.

    HeadraceError
    ├── ClientError                 the caller's fault; do not retry unchanged
    │   ├── InvalidRequest          400  invalid_request   (param names the field)
    │   │   ├── ContextTooLong      400  context_length_exceeded
    │   │   └── ContentBlocked      400  content_filter   (by a moderation hook)
    │   ├── Unauthorized            401  invalid_api_key
    │   ├── Forbidden               403  forbidden
    │   ├── NotFound                404  model_not_found, or the code given
    │   ├── WrongMethod             405  method_not_allowed
    │   ├── TooSlow                 408  request_timeout
    │   ├── TooLarge                413  request_too_large
    │   └── WrongMediaType          415  unsupported_media_type
    ├── Busy                        nobody's fault; retry after `retry_after_s`
    │   ├── QueueFull               503  queue_full
    │   ├── TooManyStreams          503  too_many_streams
    │   ├── HookUnavailable         503  hook_unavailable (one that must have its say)
    │   ├── RateLimited             429  rate_limit_exceeded (the tenant's own limit)
    │   ├── TargetMissed            503  ttft_target_missed  (no worker would be in time)
    │   ├── NoWorker                503  no_worker        (none of the gateway's workers takes it)
    │   └── ShuttingDown            503  shutting_down
    ├── TimedOut                    504  timed_out   (the server's own limits of time)
    ├── EngineError                 our fault; the request failed, the server may go on
    │   ├── RequestFailed           500  request_failed    (this request alone: NaN logits, ...)
    │   │   └── UnfitAnswer         500  unfit_answer      (a check could not mend it)
    │   ├── WorkerLost              502  worker_lost       (behind the gateway)
    │   ├── Loop                    508  loop              (a gateway's request came back to it)
    │   ├── EngineDead              503  engine_dead
    │   ├── NotReady                503  not_ready
    │   └── UsageLogFailed          503  usage_log_failed
    └── SetupError                  the operator's fault: config, files, downloads; ends the start
        ├── ConfigError             names the key, the value and where it came from
        ├── ModelError              a model that cannot be found, read or run
        └── DownloadError           offline, interrupted, or a checksum that does not match

`api/errors.py` is the one place that turns a leaf into an HTTP response or, when the stream has
begun, into an SSE error event (`gateway/answers.py` that of the gateway; `error_bodies.py` has what
both write). `code` is what travels in `messages.Done.error`.
"""

from __future__ import annotations

import math


class HeadraceError(Exception):
    """Base of everything headrace raises on purpose."""

    status = 500
    code = "internal_error"
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ClientError(HeadraceError):
    """The request is wrong; sending it again unchanged fails again."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class InvalidRequest(ClientError):
    """A field has a wrong type, value or combination; `param` names it."""


class ContextTooLong(InvalidRequest):
    """Prompt plus max_tokens do not fit; the message holds both numbers and the limit."""

    code = "context_length_exceeded"


class ContentBlocked(InvalidRequest):
    """A moderation hook refuses the prompt; the message is its reason."""

    code = "content_filter"


class Unauthorized(ClientError):
    """No API key, or one that is not known."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class Forbidden(ClientError):
    """Whoever asks may not do this."""

    status = 403
    code = "forbidden"
    kind = "permission_error"


class NotFound(ClientError):
    """Unknown model or unknown route."""

    status = 404
    code = "model_not_found"
    kind = "not_found_error"


class WrongMethod(ClientError):
    """The route exists, but not for this HTTP method."""

    status = 405
    code = "method_not_allowed"


class WrongMediaType(ClientError):
    """The body is declared to be something other than JSON."""

    status = 415
    code = "unsupported_media_type"


class TooSlow(ClientError):
    """The request did not arrive whole in time."""

    status = 408
    code = "request_timeout"


class TooLarge(ClientError):
    """The body is over the size limit."""

    status = 413
    code = "request_too_large"


class Busy(HeadraceError):
    """No room now; the same request may succeed after `retry_after_s`."""

    status = 503
    kind = "overloaded_error"
    retry_after_s = 1


class QueueFull(Busy):
    """The waiting queue is at its limit."""

    code = "queue_full"


class TooManyStreams(Busy):
    """As many requests are being answered as this server answers at once."""

    code = "too_many_streams"


class HookUnavailable(Busy):
    """A hook that must have its say could not be reached."""

    code = "hook_unavailable"


class RateLimited(Busy):
    """The tenant has used up what it may use now."""

    status = 429
    code = "rate_limit_exceeded"
    kind = "rate_limit_error"

    def __init__(self, message: str, *, wait_s: float = 0.0) -> None:
        """wait_s: when it may be tried again; 0 = never."""
        super().__init__(message)
        self.retry_after_s = math.ceil(wait_s)


class TargetMissed(Busy):
    """No worker would answer within the time that the client set."""

    code = "ttft_target_missed"


class NoWorker(Busy):
    """No worker behind the gateway can take the request now."""

    code = "no_worker"


class ShuttingDown(Busy):
    """The server is draining and admits nothing new."""

    code = "shutting_down"


class TimedOut(HeadraceError):
    """The answer took longer than the server lets one take."""

    status = 504
    code = "timed_out"
    kind = "timeout_error"


class EngineError(HeadraceError):
    """The fault is ours."""


class RequestFailed(EngineError):
    """This request alone failed (its logits were not finite, say); others go on."""

    code = "request_failed"


class UnfitAnswer(RequestFailed):
    """The answer did not pass a check and could not be mended."""

    code = "unfit_answer"


class WorkerLost(EngineError):
    """The worker behind the gateway died, hung or broke off its answer."""

    status = 502
    code = "worker_lost"


class Loop(EngineError):
    """A request came back to the gateway that had sent it on."""

    status = 508
    code = "loop"


class EngineDead(EngineError):
    """The engine process ended or stopped answering."""

    status = 503
    code = "engine_dead"


class NotReady(EngineError):
    """The model is still loading."""

    status = 503
    code = "not_ready"


class UsageLogFailed(EngineError):
    """What a request used cannot be written down."""

    status = 503
    code = "usage_log_failed"


class SetupError(HeadraceError):
    """The operator must change something before the server can start."""

    code = "setup_error"


class ConfigError(SetupError):
    """A setting is unknown or has a bad value."""

    code = "config_error"


class ModelError(SetupError):
    """The model cannot be found, read or run."""

    code = "model_error"


class DownloadError(SetupError):
    """A download failed, was cut, or does not match its checksum."""

    code = "download_error"


def _leaves(cls: type[HeadraceError]) -> list[type[HeadraceError]]:
    below = cls.__subclasses__()
    return [cls, *(leaf for sub in below for leaf in _leaves(sub))]


def by_code(code: str, message: str) -> HeadraceError:
    """The exception that `messages.Done.error` names; `RequestFailed` for an unknown code."""
    for cls in _leaves(HeadraceError):
        if cls.__dict__.get("code") == code:
            return cls(message)
    return RequestFailed(message)
