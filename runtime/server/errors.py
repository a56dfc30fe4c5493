"""Errors as OpenAI's clients expect them: a status, a body of one shape, and whether a retry makes sense."""

from __future__ import annotations

from typing import Any

from runtime.errors import ContextLengthError, DeviceError, UserError, VerificationError
from runtime.living_kv.errors import MemoryUsageError, StoreNotFoundError, StoreRefusedError

RETRY_AFTER_S = 2  # clients wait this long after 429 and after 503 while loading; above 120 they give up at once


class ApiError(Exception):
    """An answer with a status and a body in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.extra = extra

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def headers(self) -> dict[str, str]:
        """What tells clients when to try again; each try of a failed prompt would cost another prefill."""
        if self.status == 429 or self.code == "loading":
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"x-should-retry": "false"}

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return {"error": error}

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Return the answer to an error in what was asked; what nobody expected is a 500 without details."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ContextLengthError):
            sizes = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
            message = f"{error.message} Please reduce the length of the messages."
            return cls(400, message, "context_length_exceeded", "messages", **sizes)
        if isinstance(error, (DeviceError, VerificationError)):  # the request is not to blame
            return cls.internal(error)
        if isinstance(error, StoreNotFoundError):
            return cls(404, f"{error.message}; {error.hint}", "memory_store_not_found", "memory")
        if isinstance(error, StoreRefusedError):
            return cls(400, f"{error.message}; {error.hint}", "memory_store_refused", "memory")
        if isinstance(error, MemoryUsageError):
            return cls(400, f"{error.message}; {error.hint}", "invalid_value", "memory")
        if isinstance(error, UserError):
            message = f"{error.message}; {error.hint}" if error.hint else error.message
            return cls(400, message, "invalid_request")
        return cls.internal(error)

    @classmethod
    def internal(cls, error: Exception) -> ApiError:
        """Return the answer to a failure inside: neither the words of the error nor a path leave the machine."""
        return cls(
            500,
            f"this request failed inside the server ({type(error).__name__}); see its log",
            "internal_error",
        )


def bad(message: str, param: str, code: str = "invalid_value") -> ApiError:
    """Return the 400 about one field."""
    return ApiError(400, message, code, param)
