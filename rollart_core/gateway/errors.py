"""What the gateway refuses, in the shape of OpenAI's API.

Takes: what is wrong with a request. Gives: :class:`RequestError` with its HTTP status and body.
Never: says why an engine failed beyond one line.
"""

from __future__ import annotations

from rollart_core.errors import first_line


class RequestError(Exception):
    """A request that gets no answer.

    Args:
        message: What is wrong, and how to mend it.
        status: HTTP status.
        code: OpenAI's ``code``, which programs look at.
        kind: OpenAI's ``type``.
        param: Which field it is about.
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
        """Whether asking again may help."""
        return self.status >= 500

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return what is sent."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_field(param: str, message: str, code: str | None = "invalid_value") -> RequestError:
    """Return the refusal of a field that is wrong."""
    return RequestError(f"{param}: {message}", code=code, param=param)


def unsupported(param: str, message: str) -> RequestError:
    """Return the refusal of a field that is right elsewhere."""
    return bad_field(param, message, "unsupported_value")


def wrong_key(message: str) -> RequestError:
    """Return the refusal of a key that is none, or was never given out."""
    return RequestError(message, status=401, code="invalid_api_key")


def episode_over() -> RequestError:
    """Return the refusal of a key whose episode has ended."""
    return RequestError("this episode has ended; its key is dead", status=410, code="episode_over")


def out_of_turns(max_turns: int) -> RequestError:
    """Return the refusal of a request beyond the episode's budget."""
    return RequestError(
        f"this episode may ask {max_turns} times, and has",
        status=429,
        code="insufficient_quota",
        kind="insufficient_quota",
    )


def context_overflow(max_tokens: int, has: str) -> RequestError:
    """Return the refusal of messages that leave no room for an answer.

    Args:
        max_tokens: Of the model's context.
        has: What the messages have instead, as a predicate.
    """
    return RequestError(
        f"This model's maximum context length is {max_tokens} tokens. However, your messages "
        f"{has}. Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )


def engine_failed(error: Exception, status: int = 503) -> RequestError:
    """Return the answer to a request that the engine could not answer."""
    message = first_line(str(error)) or type(error).__name__
    return RequestError(message, status=status, code="engine_error", kind="server_error")
