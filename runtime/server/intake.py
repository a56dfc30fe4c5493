"""What a request becomes: a job with its prompt as tokens, its sampling and its parser, or an error."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from runtime.engine import Engine
from runtime.sampling import SamplingParams
from runtime.server.errors import ApiError, bad
from runtime.server.jobs import Job
from runtime.server.memory import Remembers
from runtime.server.requests import ChatRequest, CompletionRequest, Request
from runtime.text import TextCodec


def prepare(
    request: Request,
    name: str,
    loop: asyncio.AbstractEventLoop,
    engine: Engine,
    codec: TextCodec,
    memory: Remembers | None,
) -> Job:
    """Return the job of a request.  name: its id.  loop: where its messages go.

    Raises ApiError or UserError for what this model or this server cannot answer.
    """
    params = _sampling(engine.default_sampling(), request)
    if isinstance(request, ChatRequest):
        if request.memory is not None:
            if memory is None:
                raise bad("this server has no memory", "memory", "unsupported")
            memory.check(request.memory)
            return Job(
                name, request.model, [], params, codec.plain_parser(), loop,
                question=request.question, memory=request.memory,
            )  # fmt: skip
        prompt = codec.encode_chat(request.messages, request.options)
        engine.check_prompt(prompt)
        parser = codec.parser(request.options)
        if request.forced is not None:
            prompt = prompt + codec.force_call(request.forced, parser)
            engine.check_prompt(prompt)
        shared = codec.shared_tokens(prompt, request.messages, request.options)
        thinks = request.options.thinking
        return Job(name, request.model, prompt, params, parser, loop, shared, thinks)
    assert isinstance(request, CompletionRequest)
    prompt = prompt_tokens(request, codec)
    engine.check_prompt(prompt)
    return Job(name, request.model, prompt, params, codec.plain_parser(), loop)


def prompt_tokens(request: CompletionRequest, codec: TextCodec) -> list[int]:
    """Return a text completion's prompt: markers in it are markers, and the start token stands once."""
    if isinstance(request.prompt, tuple):
        if any(token >= codec.vocab_size for token in request.prompt):
            raise ApiError(
                400,
                f"prompt holds ids beyond this model's {codec.vocab_size} tokens",
                "invalid_value",
                "prompt",
            )
        return list(request.prompt)
    return codec.encode_prompt(request.prompt)


def _sampling(defaults: SamplingParams, request: Request) -> SamplingParams:
    names = (
        *("temperature", "top_p", "top_k", "min_p", "seed", "logprobs"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    )
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    return replace(defaults, **given, stop=request.stop, max_tokens=request.max_tokens)
