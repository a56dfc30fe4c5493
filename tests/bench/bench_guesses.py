"""How often the next layer's experts are guessed right, by three ways of guessing, on the bundled model.

    python tests/bench/bench_guesses.py

Prints recall (share of the next layer's top-k that is among the top-k guessed) and the share of right ones among the
best two guesses, over a greedy story. Not collected by pytest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from torch import Tensor

from conf.schema import RunConfig, load
from runtime.engine import Engine
from runtime.models.qwen_moe import Moe
from runtime.session import Session
from stages.core import Runner
from stages.opening import engine_files
from stages.verify_measures import greedy_answer

TOKENS = 120


def main() -> None:
    ConfigStore.instance().store(name="schema", node=RunConfig)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = load(compose("config", ["prefetch.experts=0"]))
    runner = Runner(cfg, ROOT / cfg.paths.artifacts)
    runner.run(["residents", "repack"])
    files = engine_files({name: runner.find(name) for name in ("download", "repack", "residents")})
    engine = Engine.open(cfg, files)
    model = engine.model
    inputs: dict[int, Tensor] = {}  # layer -> input of its router
    residuals: dict[int, Tensor] = {}  # layer -> streams before its expert block
    hits = {
        "input as it is": [0, 0],
        "ratio of norms": [0, 0],
        "full read of the next mixer": [0, 0],
    }
    count = 0

    read, call = type(model.mlp_mixers[0]).read, Moe.__call__
    layer_of = {id(mixer): layer for layer, mixer in enumerate(model.mlp_mixers)}

    def read_and_keep(self, residual):
        if id(self) in layer_of:
            residuals[layer_of[id(self)]] = residual
        return read(self, residual)

    def call_and_compare(self, x, experts, num_guesses):
        nonlocal count
        if x.shape[0] == 1:
            inputs[self.layer] = x
            if self.layer:
                true = set(F.linear(x, self.router)[0].topk(model.spec.top_k).indices.tolist())
                before = model.moes[self.layer - 1]
                ways = {
                    "input as it is": inputs[self.layer - 1],
                    "ratio of norms": inputs[self.layer - 1] * before.next_ratio,
                    "full read of the next mixer": model.mlp_mixers[self.layer].mix(
                        residuals[self.layer - 1]
                    )[0],
                }
                for name, guess in ways.items():
                    guessed = (
                        F.linear(guess, self.router)[0].topk(model.spec.top_k).indices.tolist()
                    )
                    hits[name][0] += len(true.intersection(guessed))
                    hits[name][1] += len(true.intersection(guessed[:2]))
                count += 1
        return call(self, x, experts, num_guesses)

    type(model.mlp_mixers[0]).read, Moe.__call__ = read_and_keep, call_and_compare
    with torch.inference_mode():
        prompt = engine.codec.encode_chat(
            [{"role": "user", "content": "Tell me a short story about a fox."}]
        )
        greedy_answer(Session(engine), prompt, TOKENS)
    engine.close()
    result = {
        name: {"recall": all_ / count / model.spec.top_k, "best_two": two / count / 2}
        for name, (all_, two) in hits.items()
    }
    for name, row in result.items():
        print(
            f"{name:30} recall {row['recall']:.1%}  best two {row['best_two']:.1%}", file=sys.stderr
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
