"""Which of several servers a request goes to: a conversation always to the same, where its copies lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

PROMPT_BEGINNING = 256  # characters or tokens of a text completion that name it


def conversation_key(body: bytes) -> str:
    """Return what all requests of one conversation have in common; "" of what is no conversation.

    That is all up to the first message of the user: a next turn repeats it. Conversations that begin alike share a key,
    and their copies as well.
    """
    try:
        asked = json.loads(body)
    except ValueError:  # whoever gets it says what is wrong with it
        return ""
    begin = _beginning(asked) if isinstance(asked, dict) else None
    if begin is None:
        return ""
    return blake2b(json.dumps(begin, sort_keys=True).encode(), digest_size=16).hexdigest()


def _beginning(asked: dict[str, Any]) -> Any | None:
    messages, prompt = asked.get("messages"), asked.get("prompt")
    if isinstance(messages, list):
        roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
        first = roles.index("user") + 1 if "user" in roles else len(messages)
        return messages[:first]
    if isinstance(prompt, (str, list)):
        return prompt[:PROMPT_BEGINNING]
    return None


def preference(key: str, names: Sequence[str]) -> list[str]:
    """Return the names, the one for this key first, by rendezvous hashing: when one goes, only its keys move."""

    def weight(name: str) -> bytes:
        return blake2b(f"{key}\n{name}".encode(), digest_size=16).digest()

    return sorted(names, key=weight)
