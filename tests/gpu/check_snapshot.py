"""Check a real DeepSeek-V4.1-Flash snapshot, its own code and this machine's kernels.

    python tests/gpu/check_snapshot.py SNAPSHOT_DIR [--quick] [KEY=VALUE ...]

Keys are those of run.py (hw=rtx5060, deepseek.kernels=ours, ...). What is made goes to outputs/check_snapshot. On a
small card all of it takes long: --quick leaves out the long prompts and decoding across 1,024. Exit code 1: red rows.

1 header table  2 kernel probe  3 one expert, and layers against the native arithmetic  4 Engram constants and row ids
5 tokens: plain path against every speed-up  6 prompt lengths, and decoding across limits  7 restored conversations
8 prompts as strings against the snapshot's own encoder
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

import torch
from tiny_setup import make_runner

from runtime.checkpoint import Checkpoint
from runtime.deepseek_text import encode_messages, read_tools_block
from runtime.errors import UserError
from runtime.experts.plain import PlainExperts
from runtime.models import deepseek_engram as engram
from runtime.models import deepseek_probe, deepseek_weights
from runtime.models.damage import replaced
from stages import verify_published as rows
from stages.verify import engine_files
from stages.verify_rows import Case, Row

NUM_TENSORS, TENSORS_NBYTES = 96_085, 510_286_023_000
# appendix A of the specification: the release's, found independently of this code
MULTIPLIERS = (
    (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (67716810739261, 51510806800915, 30921347202721, 82619226485591),
)
FIRST_PRIMES, LAST_PRIMES = (16000057, 16000477), (16000463, 16000889)
SENTENCE = "The quick brown fox jumps over the lazy dog. Съешь ещё этих мягких французских булок."
LENGTHS = (1, 2, 3, 127, 128, 129)
LONG_LENGTHS = (255, 257, 1020)
PROBE_ROWS = (1, 17, 64, 65, 300, 512, 1024, 2048)


def header_rows(case: Case, is_release: bool) -> Iterator[Row]:
    """1: every tensor has a place, and every expert is two runs in one file."""
    checkpoint = Checkpoint.open(case.files.snapshot)
    counts = deepseek_weights.account(checkpoint, case.spec, has_drafts=case.spec.num_drafts > 0)
    deepseek_weights.expert_layout(checkpoint, case.spec)
    if case.spec.num_drafts:
        deepseek_weights.draft_expert_layout(checkpoint, case.spec)
    found = (sum(counts.values()), sum(i.extent.nbytes for i in checkpoint.tensors.values()))
    wanted = (NUM_TENSORS, TENSORS_NBYTES) if is_release else found
    yield Row("tensors, their bytes", f"{found}", f"{wanted}", found == wanted)


def kernel_rows(case: Case, _is_release: bool) -> Iterator[Row]:
    """2: with the row counts of the specification besides."""
    with replaced((deepseek_probe, "ROWS", PROBE_ROWS)):
        yield from rows.kernel_rows(case)


def layer_rows(case: Case, _is_release: bool) -> Iterator[Row]:
    """3."""
    yield from rows.expert_rows(case)
    yield from rows.native_rows(case)


def engram_rows(case: Case, is_release: bool) -> Iterator[Row]:
    """4: constants against the published ones; the ids of the published code against ours."""
    spec = case.spec
    layout = engram.EngramLayout.derive(spec)
    if is_release:
        found = (layout.multipliers, [p[0] for p in layout.primes], [p[-1] for p in layout.primes])
        wanted = (MULTIPLIERS, list(FIRST_PRIMES), list(LAST_PRIMES))
        yield Row("Engram constants", "as derived", "as published", found == wanted)
    hashes = engram.EngramHash(spec, engram.build_token_map(case.files.snapshot / "tokenizer.json"))
    with case.engine() as engine:
        tokens, seen = engine.codec.encode(SENTENCE), []
        request = engine.model.rows.request
        with replaced((engine.model.rows, "request", lambda ids: (seen.append(ids), request(ids)))):
            engine.model.prefill(tokens, engine.new_state())
    same = seen == [hashes.row_ids(tokens)]
    yield Row(f"Engram rows of {len(tokens)} tokens", "the published code's", "ours", same)


def token_rows(case: Case, _is_release: bool) -> Iterator[Row]:
    """5."""
    yield from rows.index_key_rows(case)
    yield from rows.setting_rows(case)


def length_rows(case: Case, _is_release: bool, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Row]:
    """6: prompts at limits of the window, then decoding over the next: streamed against the plain path."""
    generator = torch.Generator().manual_seed(0)
    plain = PlainExperts(
        deepseek_weights.expert_layout(Checkpoint.open(case.files.snapshot), case.spec)
    )
    with case.engine() as engine:
        for length in (n for n in lengths if n + 8 <= engine.context_tokens):
            tokens = torch.randint(3, case.spec.vocab_size // 2, (length + 8,), generator=generator)
            runs = []
            for source in (plain, engine.model.experts, engine.model.experts):
                with replaced((engine.model, "experts", source)):
                    state = engine.new_state()
                    logits = [engine.model.prefill(tokens[:length].tolist(), state)]
                    logits += [engine.model.decode(t, state) for t in tokens[length:].tolist()]
                    runs.append(torch.cat(logits))
            is_ok = all(torch.equal(runs[0], run) for run in runs[1:])
            is_ok = is_ok and bool(runs[0].isfinite().all())
            found = "the same bits" if is_ok else "OTHER BITS"
            yield Row(f"prompt of {length}, 8 decoded", found, "the plain path's, twice", is_ok)
    plain.close()


def state_rows(case: Case, _is_release: bool) -> Iterator[Row]:
    """7."""
    yield from rows.state_rows(case)


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}
CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"town": "Ghent"}'},
}
ASKED = [{"role": "user", "content": "Who are you?"}]
ANSWERED = [
    *ASKED,
    {"role": "assistant", "reasoning_content": "A greeting.", "content": "A model."},
]
CONVERSATIONS = {
    "one question": ASKED,
    "a leading system text": [{"role": "system", "content": "Be brief."}, *ASKED],
    "a second question": [*ANSWERED, {"role": "user", "content": "And who am I?"}],
    "two user messages in a row": [*ASKED, {"role": "user", "content": "Answer in Dutch."}],
    "a later system text": [*ANSWERED, {"role": "system", "content": "Be rude."}],
}
WITH_TOOLS = [
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "content": "Yes."},
]


def encoder_rows(case: Case, is_release: bool) -> Iterator[Row]:
    """8: the snapshot's encoding/encoding.py is run; the prompts that it makes, against ours."""
    path = case.files.snapshot / "encoding" / "encoding.py"
    if not path.is_file():
        wanted = "encoding/encoding.py" if is_release else "none"
        yield Row("the snapshot's encoder", "none", wanted, not is_release)
        return
    module_spec = importlib.util.spec_from_file_location("snapshot_encoding", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    encoder = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(encoder)
    texts = {
        f"{name}, {mode}": (messages, mode, None, encode_messages(messages, mode == "thinking"))
        for name, messages in CONVERSATIONS.items()
        for mode in ("chat", "thinking")
    }
    for effort in ("low", "max"):
        ours = encode_messages(ASKED, True, effort)
        texts[f"effort {effort}"] = (ASKED, "thinking", effort, ours)
    block = read_tools_block(path.read_text())
    offered = [{"role": "system", "content": "", "tools": [TOOL]}, *WITH_TOOLS]
    for mode in ("chat", "thinking"):
        ours = encode_messages(WITH_TOOLS, mode == "thinking", tools=[TOOL], tools_block=block)
        texts[f"a tool, its call and result, {mode}"] = (offered, mode, None, ours)
    for name, (messages, mode, effort, ours) in texts.items():
        more = {} if effort is None else {"reasoning_effort": effort}
        try:
            theirs = encoder.encode_messages(messages, thinking_mode=mode, **more)
        except (TypeError, KeyError, ValueError) as error:  # its signature was found, not published
            theirs = f"{type(error).__name__}: {error}"
        found = "the same" if ours == theirs else f"ours {ours!r}, theirs {theirs!r}"
        yield Row(f"prompt, {name}", found, "the snapshot's encoder's", ours == theirs)


CHECKS: tuple[Callable[[Case, bool], Iterator[Row]], ...] = (
    header_rows, kernel_rows, layer_rows, engram_rows, token_rows, length_rows, state_rows,
    encoder_rows,
)  # fmt: skip


def run_checks(case: Case, is_release: bool, is_quick: bool) -> list[Row]:
    """Print every row as it is found.  Returns them.

    is_release: compare with the release's published numbers.
    """
    found = []

    def note(row: Row) -> None:
        found.append(row)
        print(
            f"{row.name}: {row.found} (wanted: {row.wanted})  {'ok' if row.is_ok else 'RED'}",
            flush=True,
        )

    for number, check in enumerate(CHECKS, 1):
        print(f"-- {number} {check.__name__}", flush=True)
        for row in check(case, is_release):
            note(row)
    if not is_quick:
        for row in length_rows(case, is_release, LONG_LENGTHS):
            note(row)
    return found


def main(argv: list[str]) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--quick", action="store_true", help="no long prompts")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "check_snapshot")
    parser.add_argument(
        "--other-checkpoint", action="store_true", help="do not compare with the release's numbers"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(argv)
    words = (
        "model=deepseek", "model.source=local", f"model.path={args.snapshot.resolve()}",
        "deepseek.arithmetic=reference", *args.overrides,
    )  # fmt: skip
    try:
        runner = make_runner(args.outputs, *words)
        runner.run(["patch"])
        inputs = {name: runner.find(name) for name in ("download", "patch")}
        case = Case.open(runner.cfg, engine_files(inputs))
        found = run_checks(case, not args.other_checkpoint, args.quick)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    red = [row.name for row in found if not row.is_ok]
    print(
        f"{len(found) - len(red)} of {len(found)} ok" + (f"; red: {', '.join(red)}" if red else "")
    )
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
