"""DeepSeek's two arithmetics on a CPU, sublayer by sublayer, at the released width with random weights.

    python tests/bench/compare_arithmetics.py FOLDER [--tokens 140] [--ours lists sums angles]

Makes a checkpoint of four layers (0, 1, 2 and 20 of the release), eight experts and a small vocabulary below FOLDER
(1.4 GB), runs a prompt through the stand-in for the published code, and gives each native sublayer what the published
one was given. Prints where results are not equal; then the whole model, layer by layer. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

import pytest
import torch
from tiny_setup import make_runner

from kernels import reference_deepseek as ops
from runtime.checkpoint import Checkpoint
from runtime.engine import Engine, EngineFiles
from runtime.models.deepseek import open_record
from runtime.models.deepseek_model import Block, Choice
from runtime.models.deepseek_state import DeepseekState
from runtime.models.deepseek_weights import resident_shapes
from stages import synthetic_deepseek
from stages.download import snapshot_of
from tests.parity.deepseek_sublayers import OURS, Sublayers, layer_tables, recording
from tests.standin import make_published

POSITIONS = 256


def make_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    """Return a checkpoint of the released widths with the bundled tokenizer's vocabulary, and its overrides."""
    config = json.loads((synthetic_deepseek.RELEASED / "config.json").read_text())
    config["text_config"]["vocab_size"] = synthetic_deepseek._num_tokens()
    (folder / "release").mkdir(parents=True, exist_ok=True)
    (folder / "release" / "config.json").write_text(json.dumps(config))
    sizes = ("layers=4", "experts=8", "disk_gib=6", "ngram_rows=20000")
    overrides = [
        "model=deepseek_synthetic", f"model.path={folder / 'release'}", "hw=cpu", "cache.ram_gib=0.2",
        *(f"model.synthetic.{size}" for size in sizes), f"model.context_tokens={POSITIONS}",
    ]  # fmt: skip
    runner = make_runner(folder, *overrides)
    runner.run(["download"])
    return snapshot_of(runner.find("download")), overrides


class Native:
    """The native layers, one in memory at a time."""

    def __init__(self, engine: Engine, snapshot: Path) -> None:
        """engine: of the published code; its experts serve both."""
        self.model, self.checkpoint = engine.model, Checkpoint.open(snapshot)
        self.spec = engine.model.spec
        self.open_expert = partial(open_record, engine.model.parts.layout)

    def blocks(self):
        """Yield one layer after the other."""
        shapes = resident_shapes(self.spec)
        for layer in range(self.spec.num_layers):
            names = [name for name in shapes if name.startswith(f"layers.{layer}.")]
            weights = {name: self.checkpoint.load(name) for name in names}
            yield Block(weights, layer, self.spec)

    def compare_sublayers(self, layers) -> None:
        """Print what differs from the published sublayers' results, given their inputs."""
        sublayers, equal, unequal = Sublayers(self.spec, POSITIONS), set(), set()
        for block, layer in zip(self.blocks(), layers, strict=True):
            for part in sublayers.run(block, layer, self.model.experts, self.open_expert):
                name = part.name.partition(":")[0]
                (unequal if part.unequal else equal).add(name)
                if part.unequal and not part.name.startswith(("mix of", "routing weights")):
                    places = f"{part.unequal:.1e} of {part.found.numel():,}"
                    print(
                        f"  layer {part.layer}  {part.name:28} {places:22} error {part.error:.1e}"
                    )
        print(f"  equal in every layer: {', '.join(sorted(equal - unequal))}", flush=True)

    @torch.inference_mode()
    def compare_whole(self, layers) -> None:
        """Print how far streams are apart behind each layer, when each code goes on with its own."""
        tables, state, choice = (
            layer_tables(self.spec, POSITIONS),
            DeepseekState(self.spec),
            Choice(),
        )
        streams, pre = layers[0].streams[0].clone(), layers[0].pre[0]
        for block, layer in zip(self.blocks(), layers, strict=True):
            if layer.engram is not None:
                streams = block.engram(streams, layer.engram[1])
            after, post, comb = block.hc_attn.mixes(streams)
            u = ops.rms_norm(ops.hyper_read(streams, pre), block.attn_norm, self.spec.eps)
            y = block.attention(u, 0, choice, state, *tables[block.layer])
            streams = ops.hyper_write(y, streams, post, comb)
            pre, post, comb = block.hc_ffn.mixes(streams)
            u = ops.rms_norm(ops.hyper_read(streams, after), block.ffn_norm, self.spec.eps)
            y = block.moe(u, self.model.experts, self.open_expert)
            streams = ops.hyper_write(y, streams, post, comb)
            a, b = (part.double().flatten(1) for part in (streams, layer.written[1][1]))
            errors = (a - b).norm(dim=1) / b.norm(dim=1)
            print(
                f"  behind layer {block.layer}: rows' error, median {errors.median():.1e}, largest {errors.max():.1e}"
            )


def main() -> None:
    """Run one prompt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=140)
    parser.add_argument(
        "--ours", nargs="*", choices=OURS, default=[], help="what the published code does as we do"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    snapshot, overrides = make_checkpoint(options.folder)
    code = options.folder / "standin"
    files = EngineFiles(
        snapshot, published=code / "patched" if code.exists() else make_published(snapshot, code)
    )
    reference = [
        "model.setup=[download,patch]",
        "deepseek.arithmetic=reference",
        "deepseek.kernels=ours",
    ]
    engine = Engine.open(make_runner(options.folder, *overrides, *reference).cfg, files)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, 4600, (options.tokens,), generator=generator).tolist()
    native = Native(engine, snapshot)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for name in options.ours:
            OURS[name](engine.model, patch)
        with recording(engine.model) as layers:
            engine.model.prefill(tokens, engine.new_state())
        native.compare_sublayers(layers)
        native.compare_whole(layers)
    engine.close()


if __name__ == "__main__":
    main()
