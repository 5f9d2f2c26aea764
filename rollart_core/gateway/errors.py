"""The gateway's error responses, in the format of OpenAI's API.

Takes: the problem of a request. Gives: :class:`RequestError` with its HTTP status and body. Never:
reports an engine failure in more than one line.
"""

from __future__ import annotations

from rollart_core.errors import first_line


class RequestError(Exception):
    """A rejected request.

    Args:
        message: The problem, and how to fix it.
        status: HTTP status.
        code: OpenAI's ``code``, which programs read.
        kind: OpenAI's ``type``.
        param: The field with the problem.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        kind: str = "invalid_request_error",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.param = param

    @property
    def retried(self) -> bool:
        """Whether a retry may succeed."""
        return self.status >= 500

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body of the response."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_field(param: str, message: str, code: str | None = "invalid_value") -> RequestError:
    """Return the error for an invalid field."""
    return RequestError(f"{param}: {message}", code=code, param=param)


def unsupported(param: str, message: str) -> RequestError:
    """Return the error for a valid field that is not supported."""
    return bad_field(param, message, "unsupported_value")


def wrong_key(message: str) -> RequestError:
    """Return the error for a missing or unknown API key."""
    return RequestError(message, status=401, code="invalid_api_key")


def episode_over() -> RequestError:
    """Return the error for an API key whose episode has ended."""
    return RequestError("this episode has ended; its key is void", status=410, code="episode_over")


def out_of_turns(max_turns: int) -> RequestError:
    """Return the error for a request beyond the episode's budget."""
    return RequestError(
        f"all {max_turns} requests of this episode are used",
        status=429,
        code="insufficient_quota",
        kind="insufficient_quota",
    )


def context_overflow(max_tokens: int, has: str) -> RequestError:
    """Return the error for messages that leave no tokens for an answer.

    Args:
        max_tokens: Length of the model's context.
        has: The length of the messages, as a predicate.
    """
    return RequestError(
        f"This model's maximum context length is {max_tokens} tokens. However, your messages "
        f"{has}. Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )


def engine_failed(error: Exception, status: int = 503) -> RequestError:
    """Return the error for a request that the engine could not answer."""
    message = first_line(str(error)) or type(error).__name__
    return RequestError(message, status=status, code="engine_error", kind="server_error")
