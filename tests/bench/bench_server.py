"""What a client waits for at a running server: the first byte while another prompt is read, a follow-up, and per token.

    python run.py serve.port=8000        # in another terminal
    python tests/bench/bench_server.py --url http://127.0.0.1:8000

Prints one line a measurement. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

import httpx

LONG_WORDS = 900  # of the prompt that is being read
SHORT = "Tell me a short story about a fox."


def chat(client: httpx.Client, *texts: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a whole answer to a conversation."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    body = {"messages": messages, "temperature": 0, **fields}
    answer: dict[str, Any] = (
        client.post("/v1/chat/completions", json=body).raise_for_status().json()
    )
    return answer


def first_byte_ms(client: httpx.Client, number: int) -> tuple[float, bool]:
    """Return how long the first byte of a stream took, and whether another prompt was being read then."""
    prompt = f"{number} " + "one two three " * LONG_WORDS
    long = threading.Thread(target=lambda: chat(client, prompt, max_tokens=1))
    long.start()
    time.sleep(0.4)
    running = client.get("/status").json()["queue"]["running"]
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": 1,
    }
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        took = (time.perf_counter() - started) * 1e3
        for _ in pieces:
            pass
    long.join()
    return took, running is not None and running["phase"] == "prefill"


def main() -> None:
    """Measure a running server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    with httpx.Client(base_url=arguments.url, timeout=600) as client:
        found = [first_byte_ms(client, number) for number in range(arguments.repeats)]
        waits = sorted(ms for ms, was_reading in found if was_reading)
        print(
            f"first byte while another prompt is read: median {statistics.median(waits):.1f} ms, "
            f"most {waits[-1]:.1f} ms of {len(waits)}"
        )
        first = chat(client, SHORT, max_tokens=64)
        text = first["choices"][0]["message"]["content"]
        for what, texts in (("again", (SHORT,)), ("follow-up", (SHORT, text, "What is a whale?"))):
            answer = chat(client, *texts, max_tokens=1)
            usage, timings = answer["usage"], answer["timings"]
            print(
                f"{what}: prompt {usage['prompt_tokens']} tokens, "
                f"{usage['prompt_tokens_details']['cached_tokens']} cached, first token after "
                f"{timings['ttft_ms']:.1f} ms"
            )
        started = time.perf_counter()
        last = chat(client, SHORT, max_tokens=120)
        took = time.perf_counter() - started
        print(
            f"{last['usage']['completion_tokens'] / took:.1f} tok/s over HTTP, {json.dumps(last['timings'])}"
        )


if __name__ == "__main__":
    main()
