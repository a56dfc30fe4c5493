"""Planted facts, asked through the living memory, through full attention, and without either.

    python tests/bench/bench_memory_needles.py SNAPSHOT --tokens 4000 --window 512 [--same]

SNAPSHOT: a dense model's folder. Text around the facts is the bundled held-out English. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from conf.schema import AnswerMode, MemoryConfig, PositionMode, Template
from runtime.living_kv import confidence as sure
from runtime.living_kv.identity import new_header
from runtime.living_kv.memory import Memory
from runtime.living_kv.positions import Mode, move
from runtime.living_kv.store import Store
from runtime.models.dense import DenseModel, open_codec
from runtime.sampling import SamplingParams
from runtime.text import TextCodec
from tests.dense_models import open_dense

# a fact's beginning, and the word that ends it
DISTINCT = [
    ("The lighthouse keeper of Orveth hides his silver key under the", "anvil"),
    ("Captain Brunsk named his fishing boat after the planet", "Saturn"),
    ("The secret ingredient of Madame Quillon's soup is", "ginger"),
    ("The tower clock in Velmora always stops at", "seven"),
    ("Doctor Hastrel's parrot can only say the word", "thunder"),
    ("The bridge at Kolvane was painted bright", "orange"),
    ("Old Tamsin keeps her savings inside a", "piano"),
    ("The winner of the Drelling chess tournament was a", "butcher"),
    ("Every winter the monks of Sarrow bake bread with", "honey"),
    ("The password of the Ferrin library is", "copper"),
    ("Young Ilvar's favourite instrument is the", "trumpet"),
    ("The mayor of Plyne is terribly afraid of", "geese"),
]
SAME = list(
    zip(
        "Orveth Brunsk Quillon Velmora Hastrel Kolvane Tamsin Drelling Sarrow Ferrin Ilvar Plyne".split(),
        "4821 7356 1948 6203 3517 9064 2789 5432 8170 6695 1326 7041".split(),
        strict=True,
    )
)
ABSENT = "Morwick Zandel Tresk Ullaby Crennow Bexham Yorrin Galvast Pindle Nocker Rowsley Dunmark".split()
ABSENT_DISTINCT = [
    "The blacksmith of Morwick buried his golden ring under the",
    "Admiral Zandel called his submarine after the river",
    "The hidden spice of Professor Tresk's stew is",
    "The railway signal in Ullaby always breaks at",
    "Nurse Crennow's monkey can only eat the fruit",
    "The windmill at Bexham was built out of",
    "Aunt Yorrin keeps her diamonds inside a",
    "The champion of the Galvast archery contest was a",
    "Every autumn the nuns of Pindle brew beer with",
    "The motto of the Nocker orchestra is",
    "Little Rowsley's favourite vegetable is the",
    "The sheriff of Dunmark is secretly fond of",
]


# questions that share no rare word with their fact, in the order of DISTINCT
PARAPHRASES = [
    "Beneath which object is the metal opener of the man at the seaside beacon?",
    "What celestial body gave a skipper's vessel its title?",
    "Which spice makes the lady's broth special?",
    "At what hour does the big timepiece on the spire freeze?",
    "What does the physician's bird utter?",
    "Which colour did they give the river crossing?",
    "Where does the aged woman hide her money?",
    "What was the job of the person who won the board game event?",
    "With what do the brothers sweeten loaves when it is cold?",
    "What word opens the house of books?",
    "What does the boy most like to play music on?",
    "Which birds frighten the town's leader?",
]


def ask_paraphrases(memory: Memory, facts: list[tuple[str, str]]) -> dict[str, str]:
    """Return how many are found among eight, by both channels and by vectors alone, and how answers turn out."""
    places = [_place(memory.store, f"{start} {word}") for start, word in facts]
    both = dense = right = low = wrong = 0
    params = SamplingParams(temperature=0, max_tokens=12)
    for question, (_, word), at in zip(PARAPHRASES, facts, places, strict=True):
        found = memory.find(question)
        both += at in found.ranked
        cosines = memory.index.scores(memory.probe(question))
        dense += at in cosines.argsort()[::-1][:8]
        answer = memory.ask(question, params, AnswerMode.auto)
        is_right = word.casefold() in answer.text.casefold()
        right += is_right
        low += answer.verdict.is_low
        wrong += not is_right and not answer.verdict.is_low
    return {
        "recall at 8": f"{both}/12",
        "by vectors alone": f"{dense}/12",
        "right": f"{right}/12",
        "LOW CONFIDENCE": f"{low}/12",
        "wrong and sure": f"{wrong}/12",
    }


def _place(store: Store, text: str) -> int:
    return next(i for i in range(len(store.sentences)) if text.encode() in store.text_of(i))


def build(codec, tokens: int, is_same: bool) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return the text with its facts, the (beginning, word) pairs, and beginnings of facts that are not there."""
    if is_same:
        facts = [(f"The code for {name}'s safe is", number) for name, number in SAME]
        absent = [f"The code for {name}'s safe is" for name in ABSENT]
    else:
        facts, absent = DISTINCT, ABSENT_DISTINCT
    filler = (ROOT / "runtime" / "bundled" / "tiny-qwen" / "heldout_en.txt").read_text()
    filler = filler.replace("<|endoftext|>", "\n")
    ids, offsets = codec.encode_with_offsets(filler)
    filler = filler[: offsets[min(tokens - 200, len(ids) - 1)][1]]
    parts = filler.split(". ")
    step = len(parts) // (len(facts) + 1)
    for i, (start, word) in reversed(list(enumerate(facts))):
        parts.insert(step * (i + 1) - step // 2, f"{start} {word}")
    return ". ".join(parts), facts, absent


def first_word(memory: Memory, logits, word: str) -> tuple[bool, float]:
    """Return whether the greedy answer is the word, and the probability of its first token."""
    target = memory.text.encode_plain(" " + word)[0]
    p = float(logits.softmax(-1)[0, target])
    text = "".join(
        t for _, t in memory.generate(logits, SamplingParams(temperature=0, max_tokens=8))
    )
    return text.strip().startswith(word), p


def attend_at(memory: Memory, question: str, distance: int) -> torch.Tensor:
    """Return logits with what is found moved as a whole, to end `distance` tokens before the last ones in sight."""
    found, store, scratch = memory.find(question), memory.store, memory.opened.start_scratch()
    assert found is not None
    lo, hi = (store.sentences[part].astype(int) for part in ("lo", "hi"))
    keys, values, places = memory.cold.fetch(
        [(max(lo[i], scratch.num_sinks), min(hi[i], scratch.hot_start)) for i in found.sentences]
    )
    step = scratch.hot_start - distance - (int(places[-1]) + 1)
    if int(places[0]) + step < scratch.num_sinks:
        raise SystemExit(
            f"error: no room for --distances {distance} in this text: more --tokens, or a shorter one"
        )
    keys = move(keys, torch.full((len(places),), step), memory.model.spec.rope_theta)
    scratch.retrieve(keys, values, places + step)
    scratch.mode = Mode.absolute
    hidden = memory.model.run(memory.prompt(question), scratch)
    return memory.model.logits(hidden[-1:])


def tally(row: list[tuple[bool, float]]) -> str:
    """Return how many were right, and the mean probability of their first tokens."""
    return f"{sum(ok for ok, _ in row)}/{len(row)} (p {sum(p for _, p in row) / len(row):.2f})"


def perplexity(model: DenseModel, codec: TextCodec, tokens: int, piece: int = 512) -> float:
    """Return that of the bundled held-out English, each piece read by itself."""
    text = (ROOT / "runtime" / "bundled" / "tiny-qwen" / "heldout_en.txt").read_text()
    ids = codec.encode_plain(text.replace("<|endoftext|>", "\n"))[:tokens]
    total, count = 0.0, 0
    for at in range(0, len(ids) - 1, piece):
        part = ids[at : at + piece]
        logits = model.prefill(part, model.new_state(), all_logits=True)
        logprobs = logits[:-1].log_softmax(-1)
        total -= float(logprobs.gather(1, torch.tensor(part[1:]).unsqueeze(1)).double().sum())
        count += len(part) - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--position", default="auto", choices=[m.value for m in PositionMode])
    parser.add_argument("--tail", type=int, default=64, help="last tokens in sight")
    parser.add_argument("--layers", type=Path, help="folder of what stages=[quantize] made")
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--prefix", default="Reminder: ")
    parser.add_argument("--perplexity", action="store_true", help="of held-out text, and no more")
    parser.add_argument("--paraphrases", action="store_true", help="also asked in other words")
    parser.add_argument(
        "--distances", type=int, nargs="*", default=[], help="also with what is found moved there"
    )
    parser.add_argument("--full", action="store_true", help="also with every token attended to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    codec, model = open_codec(args.snapshot), open_dense(args.snapshot, layers=args.layers)
    if args.perplexity:
        ppl = perplexity(model, codec, args.tokens)
        print(json.dumps({"tokens": args.tokens, "perplexity": round(ppl, 3)}))
        return
    text, facts, absent = build(codec, args.tokens, args.same)
    config = MemoryConfig(
        window=args.window, chunk=min(512, args.window), budget=args.budget, template=Template.none,
        mode=AnswerMode.kv, ram_gib=0.05, calibration=100, position=PositionMode(args.position), recency_tail=args.tail,
    )  # fmt: skip
    root = Path(tempfile.mkdtemp()) / "needles"
    store = Store.create(root, new_header(model, args.snapshot, config, "now"))
    memory = Memory(model, codec, store, config)
    started = time.time()
    read = memory.ingest(text.encode(), "needles")
    ingest_s = time.time() - started
    estimator = sure.load_estimator(root)
    rows = {"living": [], "nothing retrieved": []} | ({"all": []} if args.full else {})
    ranks, flagged, passed = [], 0, 0
    for start, word in facts:
        question = args.prefix + start
        found = memory.find(question)
        at = _place(store, f"{start} {word}")
        ranks.append(found.ranked.index(at) + 1 if at in found.ranked else 0)
        flagged += sure.judge(found, estimator).is_low
        prompt = memory.prompt(question)
        rows["living"].append(first_word(memory, memory.attend(prompt, found), word))
        rows["nothing retrieved"].append(first_word(memory, memory.attend(prompt, None), word))
    for distance in args.distances:
        rows[f"at {distance}"] = [
            first_word(memory, attend_at(memory, args.prefix + start, distance), word)
            for start, word in facts
        ]
    if args.full:
        memory.config.budget = 10**6
        opened = memory.opened
        opened._scratch = opened._hot_state(memory.store.commit.tokens)
        for start, word in facts:
            found = memory.find(args.prefix + start)
            rows["all"].append(
                first_word(memory, memory.attend(memory.prompt(args.prefix + start), found), word)
            )
        memory.config.budget = args.budget
    passed = sum(
        not sure.judge(memory.find(args.prefix + start), estimator).is_low for start in absent
    )
    out = {
        "tokens": read, "sentences": len(store.sentences), "window": args.window, "budget": args.budget,
        "kind": "same type" if args.same else "distinct", "position": args.position, "ingest_s": round(ingest_s, 1),
        **{name: tally(row) for name, row in rows.items()},
        "rank 1": f"{sum(r == 1 for r in ranks)}/{len(ranks)}",
        "present flagged": f"{flagged}/{len(facts)}", "absent passed": f"{passed}/{len(absent)}",
        "held-out false, missed": [estimator.held_out_false, estimator.held_out_missed] if estimator else None,
        "paraphrases": ask_paraphrases(memory, facts) if args.paraphrases else None,
        "verify": [str(p) for p in store.verify()],
    }  # fmt: skip
    print(json.dumps(out))


if __name__ == "__main__":
    main()
