"""The stages of the living memory on the command line, with a small model that recalls facts; and its needles."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.schema import AnswerMode, PositionMode, Template
from runtime.living_kv import confidence as sure
from runtime.living_kv.store import Store
from runtime.living_kv.text_store import ingest_text
from runtime.sampling import SamplingParams
from tests.data.recall_model.make import FILLER, NAMES, NUMBERS
from tests.dense_models import open_dense
from tests.living import config, open_memory

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "recall_model"


def document(facts: dict[str, str], words: int, seed: int = 0) -> str:
    """Facts, "code of NAME NUMBER .", spread over about `words` words that say nothing."""
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(FILLER, k=rng.randint(6, 14))) + " ." for _ in range(words // 11)]
    for i, (name, number) in enumerate(facts.items()):
        lines.insert((i + 1) * len(lines) // (len(facts) + 1), f"code of {name} {number} .")
    return "\n".join(lines)


def some_facts(count: int, seed: int = 1) -> tuple[dict[str, str], list[str]]:
    """Known facts, and names that are nowhere."""
    rng = random.Random(seed)
    names = rng.sample(NAMES, 2 * count)
    return {name: rng.choice(NUMBERS) for name in names[:count]}, names[count:]


def command(tmp_path, *words):
    """The command line of one run on the recall model, with the store `notes`."""
    return [
        sys.executable, "run.py", "hw=cpu", "model=qwen25_7b_1m", "model.source=local", f"model.path={MODEL}",
        "model.files=[*.json,*.safetensors]", "hw.compute_threads=1", "hw.reserve_gib=0",
        f"paths.outputs={tmp_path}", "memory.store=notes", "memory.template=none", "memory.window=256",
        "memory.chunk=128", "memory.budget=64", "memory.position=near", *words,
    ]  # fmt: skip


def run(tmp_path, *words, code=0):
    done = subprocess.run(
        command(tmp_path, *words),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_a_store_from_text_to_quotes(tmp_path):
    facts, absent = some_facts(6)
    (tmp_path / "notes.txt").write_text(document(facts, 900))
    name, number = next(iter(facts.items()))
    run(tmp_path, "stages=[memory_ingest]", f"memory.file={tmp_path}/notes.txt", "memory.tag=first")
    asked = run(tmp_path, "stages=[memory_ask]", f"memory.question=code of {name}", "max_tokens=1")
    assert asked.stdout.split() == [number]
    asked = run(tmp_path, "stages=[memory_ask]", f"memory.question=code of {absent[0]}", code=3)
    assert asked.stdout.startswith("LOW CONFIDENCE")
    quoted = run(tmp_path, "stages=[memory_quote]", f"memory.question={name}", "memory.k=1")
    assert f"\ncode of {name} {number} ." in quoted.stdout
    run(tmp_path, "stages=[memory_quote]", "memory.question=nowhere", code=3)
    assert "notes.txt [first]" in run(tmp_path, "stages=[memory_list]").stdout
    stats = json.loads(run(tmp_path, "stages=[memory_stats]").stdout)
    assert stats["kv_nbytes_per_token_computed"] == 4 * 2 * (2 * 16 + 2 * 16 / 64 + 2)
    run(tmp_path, "stages=[memory_verify]")

    store = Store.open(tmp_path / "memory" / "notes", is_writer=True)
    locked = run(tmp_path, "stages=[memory_chat]", "memory.question=code of", code=5)
    assert "E-LOCK" in locked.stderr
    store.close()
    run(tmp_path, "stages=[memory_chat]", f"memory.question=code of {name}", "max_tokens=2")
    run(tmp_path, "stages=[memory_migrate]", "memory.codec=fp16")
    assert Store.open(tmp_path / "memory" / "notes").header.codec == "fp16"
    assert (tmp_path / "memory" / "notes.bak").is_dir()
    run(tmp_path, "stages=[memory_prune]", "memory.keep=3", "memory.forget=true")
    run(tmp_path, "stages=[memory_verify]")
    assert (
        name.encode()
        not in (tmp_path / "memory" / "notes" / "txt" / "000001.txt").read_bytes()[:2000]
    )

    path = tmp_path / "memory" / "notes" / "kv" / "000001.kvb"
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.write_bytes(raw)
    found = run(tmp_path, "stages=[memory_verify]", code=4)
    assert "kv/000001.kvb, bytes 0 to" in found.stdout


def test_wrong_use_says_what_is_missing(tmp_path):
    for words, said in (
        (["stages=[memory_ask]"], "memory.question"),
        (["stages=[memory_ingest]"], "memory.file"),
        (["stages=[memory_prune]"], "memory.keep"),
        (["stages=[memory_list]", "memory.block=48"], "divide 4096"),
        (["stages=[memory_list]", "memory.block=0"], "memory.block must be at least 8"),
    ):
        assert said in run(tmp_path, *words, code=2).stderr
    assert "there is no store" in run(tmp_path, "stages=[memory_list]", code=1).stderr


def test_text_stores_need_no_torch(tmp_path):
    (tmp_path / "notes.txt").write_text("The heron nests by the weir. The otter sleeps.\n")
    code = (
        "import sys; from pathlib import Path\n"
        "from runtime.living_kv.text_store import ingest_text; from runtime.living_kv.quote import quote\n"
        "from runtime.living_kv.store import Store\n"
        f"ingest_text(Path({str(tmp_path / 's')!r}), Path({str(tmp_path / 'notes.txt')!r}).read_bytes(), 'n')\n"
        f"print(quote(Store.open(Path({str(tmp_path / 's')!r})), 'heron', 1)[0].text, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == r"b'The heron nests by the weir. The otter sleeps.\n' False"


def test_a_thousand_quotes_are_the_bytes_of_the_source_in_a_process_without_torch(tmp_path):
    texts = sorted((ROOT / "runtime" / "bundled" / "tiny-qwen").glob("heldout_*.txt"))
    text = b"\n".join(path.read_bytes() for path in texts + texts)
    (tmp_path / "source.txt").write_bytes(text)
    ingest_text(tmp_path / "s", text, "source")
    code = (
        "import random, sys; from pathlib import Path; from blake3 import blake3\n"
        "from runtime.living_kv.quote import quote_sentences; from runtime.living_kv.store import Store\n"
        f"store = Store.open(Path({str(tmp_path / 's')!r}))\n"
        f"source = Path({str(tmp_path / 'source.txt')!r}).read_bytes()\n"
        "ids = random.Random(1).sample(range(len(store.sentences)), 1000)\n"
        "found = quote_sentences(store, ids, [0.0] * 1000)\n"
        "same = sum(q.text == source[q.byte_offset : q.byte_offset + len(q.text)] for q in found)\n"
        "hashed = sum(blake3(q.text).hexdigest() == q.digest for q in found)\n"
        "print(len(found), same, hashed, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1000", "1000", "1000", "False"]


def test_twenty_sessions_in_one_store_never_speak_for_each_other(tmp_path):
    """Facts of the same form in every session: in a session's scope nothing of another one is found."""
    facts, absent = some_facts(40)
    names = list(facts)
    settings = config(
        window=128, chunk=64, budget=64, template=Template.none, mode=AnswerMode.kv, position=PositionMode.near
    )  # fmt: skip
    model = open_dense(MODEL)
    memory = open_memory(MODEL, tmp_path / "s", settings, model)
    for i in range(20):
        mine = {name: facts[name] for name in names[2 * i : 2 * i + 2]}
        memory.ingest(document(mine, 60, seed=i).encode(), f"session {i}")
    memory.close()
    memory = open_memory(MODEL, tmp_path / "s", settings, model, is_writer=False)
    owners, params = memory.store.sentences["session"], SamplingParams(temperature=0, max_tokens=1)
    right = 0
    for i in range(20):
        memory.config.scope = f"session:session {i}"
        for name in (names[2 * i], names[(2 * i + 2) % 40], absent[i]):
            found = memory.find(f"code of {name}")
            assert {int(owners[s]) for s in (*found.sentences, *found.ranked)} == {i}
        answer = memory.ask(f"code of {names[2 * i]}", params)
        assert {q["session"] for q in answer.sentences} == {f"session {i}"}
        right += answer.text.strip() == facts[names[2 * i]]
    assert right >= 15  # the small model misses some even of what it was given
    memory.close()


def test_a_killed_ingest_goes_on_and_ends_as_if_nothing_had_been(tmp_path):
    facts, _ = some_facts(6)
    (tmp_path / "notes.txt").write_text(document(facts, 6000))
    words = [
        "stages=[memory_ingest]",
        f"memory.file={tmp_path}/notes.txt",
        "memory.commit_tokens=512",
    ]
    log = tmp_path / "memory" / "notes" / "commits.log"
    child = subprocess.Popen(command(tmp_path, *words), cwd=ROOT, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (log.exists() and log.stat().st_size > 2000):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = Store.open(tmp_path / "memory" / "notes").commit.tokens
    assert before
    run(tmp_path, *words)
    store = Store.open(tmp_path / "memory" / "notes")
    text = b"".join(store.text_of(i) for i in range(store.commit.sentences))
    assert text == (tmp_path / "notes.txt").read_bytes()
    assert store.verify() == []


# ---- needles: every fact is like every other ("code of NAME NUMBER"), the model sees 128 tokens at a time ----


def needles(root, tokens, **changes):
    """Ingest 16 facts among `tokens` words. Returns (memory, facts, absent names)."""
    facts, absent = some_facts(16)
    settings = config(
        window=128, chunk=64, budget=64, template=Template.none, mode=AnswerMode.kv, commit_tokens=2048, **changes
    )  # fmt: skip
    memory = open_memory(MODEL, root, settings, open_dense(MODEL))
    memory.ingest(document(facts, tokens).encode(), "needles")
    return memory, facts, absent


def hits(memory, facts, choose):
    """How many facts the model answers with the chosen sentences in sight."""
    params = SamplingParams(temperature=0, max_tokens=1)
    right = 0
    for name, number in facts.items():
        prompt = memory.prompt(f"code of {name}")
        logits = memory.attend(prompt, choose(f"code of {name}"))
        right += "".join(text for _, text in memory.generate(logits, params)).strip() == number
    return right


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1000, 4000, 16000])
def test_needles_at_growing_lengths(tmp_path, tokens):
    memory, facts, absent = needles(tmp_path / "s", tokens, position=PositionMode.near)
    ranks = [memory.find(f"code of {name}").ranked[0] for name in facts]
    stored = [memory.store.text_of(i).decode() for i in ranks]
    assert sum(name in text for name, text in zip(facts, stored, strict=True)) == 16  # rank 1
    assert hits(memory, facts, memory.find) >= 14
    assert hits(memory, facts, lambda _: None) <= 2  # the control: nothing retrieved
    fit = sure.load_estimator(memory.store.root)
    present = [sure.judge(memory.find(f"code of {name}"), fit).is_low for name in facts]
    unknown = [sure.judge(memory.find(f"code of {name}"), fit).is_low for name in absent]
    assert sum(present) <= 1
    assert unknown.count(False) <= 1
    memory.close()


@pytest.mark.slow
def test_far_positions_need_near_for_a_model_that_never_saw_them(tmp_path):
    """The model was trained on some 100 tokens: at true distances of thousands it cannot read what is found."""
    memory, facts, _ = needles(tmp_path / "s", 8000, position=PositionMode.near)
    near = hits(memory, facts, memory.find)
    memory.config.position = PositionMode.absolute
    assert near >= 14
    assert hits(memory, facts, memory.find) < near
    memory.close()
