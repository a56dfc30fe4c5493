"""Errors that a person can mend. `run.py` prints them without a traceback; the server turns them into 4xx."""


class UserError(Exception):
    """What failed, in one sentence with numbers and units, and one hint that can be typed."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(UserError):
    """A wrong key, value or command line."""

    exit_code = 2


class VerificationError(UserError):
    """Bytes or numbers are not what they must be."""

    exit_code = 3


class DeviceError(UserError):
    """A drive or card that fails while it is used: whatever was asked is not to blame."""


class BusyError(UserError):
    """Another process holds what this one needs."""

    exit_code = 4


class ContextLengthError(UserError):
    """A prompt that does not fit into the context window."""

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, the prompt has "
            f"{prompt_tokens} tokens.",
            "shorten the prompt, or raise model.context_tokens if the model and the memory allow it",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
