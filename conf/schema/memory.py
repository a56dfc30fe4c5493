"""The living KV cache and what is asked of it: `memory`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class StoreKind(Enum):
    """What a memory store keeps."""

    kv = "kv"  # keys, values, vectors and text: the model goes on where it was
    text = "text"  # text alone: quotes without a model


class KvCodec(Enum):
    """How cold keys and values are stored."""

    k8c_v8t = "k8c_v8t"  # 8 bit: a scale per key channel of a block, a scale per value row
    k8t_v8t = "k8t_v8t"  # 8 bit: a scale per key row; needs no block, 2.5 times the error
    fp16 = "fp16"
    fp32 = "fp32"  # exact


class Fuse(Enum):
    """How the two scores of a sentence become one."""

    lin = "lin"  # cosine plus the share of words
    rrf = "rrf"  # reciprocal ranks
    dense = "dense"  # cosine alone
    lex = "lex"  # words alone


class Width(Enum):
    """How many sentences a question gets."""

    auto = "auto"  # one where it wins clearly, more where the question asks for several things
    narrow = "narrow"
    wide = "wide"  # the whole budget


class AnswerMode(Enum):
    """Where an answer comes from."""

    auto = "auto"  # kv; ground where its words are not in the store; quote with a warning where nothing is sure
    kv = "kv"  # retrieved keys and values
    ground = "ground"  # retrieved text, read again
    quote = "quote"  # stored text, nothing generated


class PositionMode(Enum):
    """Where retrieved keys stand."""

    auto = "auto"  # absolute while the distance was trained on, then dca if the model has it, else near
    absolute = "absolute"
    dca = "dca"  # dual chunk attention
    near = "near"  # packed just before the last tokens


class Template(Enum):
    """How a question becomes a prompt."""

    auto = "auto"  # through the model's chat template
    none = "none"  # as it is: the model continues it


@dataclass
class MemoryConfig:
    """The living KV cache: a store of past text that a dense model attends to."""

    store: str | None = None  # its name under paths.memory, or a folder
    kind: StoreKind = StoreKind.kv  # of a new store
    file: str | None = None  # text to take in, for stages=[memory_ingest]
    question: str | None = None  # for memory_ask, memory_chat (one turn) and memory_quote
    session: str | None = None  # name of what is taken in; null: the file's name, or chat
    tag: str = ""  # of what is taken in, to choose it by later
    scope: str = "all"  # what may be retrieved: all, session:NAME, tag:NAME, since:DATE, before:DATE, joined by +
    window: int = 4096  # tokens kept hot, exactly
    sinks: int = 4  # first tokens of the timeline, always in sight
    budget: int = 512  # tokens retrieved per question
    # true: what is taken in sees no window of the session before (retrieval may cross)
    isolate: bool = False
    recency_tail: int = 64  # last tokens in sight while a question is answered
    chunk: int = 512  # tokens of one forward
    block: int = 64  # tokens of one stored block
    codec: KvCodec = KvCodec.k8c_v8t  # of a new store
    index_layers: list[float] = field(default_factory=lambda: [0.27, 0.40, 0.53])  # of the depth
    index_dim: int = 256  # numbers of a sentence's vector, per index layer
    remove_pc: int = 2  # main directions removed from vectors
    fuse: Fuse = Fuse.lin
    gap: float = 0.15  # score difference that counts as clear
    min_sentence: int = 24  # tokens: a shorter pick takes what follows along
    width: Width = Width.auto
    mode: AnswerMode = AnswerMode.auto
    position: PositionMode = PositionMode.auto
    # distance from which position=auto moves what is found near; null: 0.95 of the positions trained on
    near_beyond: int | None = None
    template: Template = Template.auto
    confidence_target: float = 0.05  # share of unanswerable questions that may pass as answered
    calibration: int = 200  # questions that the confidence is fitted to
    commit_tokens: int = 8192  # about, of a piece that is stored as a whole
    ram_gib: float = 0.25  # of cold blocks kept in RAM
    k: int = 3  # sentences quoted
    keep: int | None = None  # for memory_prune: the newest sentences that stay
    before: str | None = None  # for memory_prune: sessions started before this day go
    sentences: list[int] = field(default_factory=list)  # for memory_prune: these go
    compact: bool = False  # for memory_prune: rewrite the store without what is pruned
    forget: bool = False  # for memory_prune: leave no copy of the text; implies compact


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "memory.window": (64, 2**24),
    "memory.sinks": (0, 64),
    "memory.budget": (1, 2**24),
    "memory.recency_tail": (1, 2**24),
    "memory.chunk": (1, 2**16),
    "memory.block": (8, 4096),
    "memory.index_dim": (8, 4096),
    "memory.remove_pc": (0, 64),
    "memory.gap": (0, 2),
    "memory.min_sentence": (0, 128),
    "memory.near_beyond": (1, 2**24),
    "memory.confidence_target": (0, 1),
    "memory.calibration": (20, 10000),
    "memory.commit_tokens": (64, 2**20),
    "memory.ram_gib": (0, 2**20),
    "memory.k": (1, 1000),
    "memory.keep": (0, 2**40),
}


def faults(memory: MemoryConfig, stages: Sequence[str]) -> Iterable[str]:
    """Yield what the memory stage among `stages` lacks, and what no range says; without one nothing is looked at."""
    wanted = [name for name in stages if name.startswith("memory_")]
    if not wanted:
        return
    name = wanted[0]
    if memory.store is None:
        yield f"stages=[{name}] needs a store: add memory.store=NAME"
    if name == "memory_ingest" and memory.file is None:
        yield "stages=[memory_ingest] needs a text: add memory.file=notes.txt"
    if (
        name in ("memory_ask", "memory_chat", "memory_quote")
        and not (memory.question or "").strip()
    ):
        yield f'stages=[{name}] needs a question: add memory.question="..."'
    if memory.block and 4096 % memory.block:
        yield f"memory.block must divide 4096, got {memory.block}"
    if not memory.index_layers or any(not 0 < f <= 1 for f in memory.index_layers):
        yield f"memory.index_layers are fractions of the depth above 0 and at most 1, got {memory.index_layers}"
    if (
        name == "memory_prune"
        and memory.keep is None
        and not memory.before
        and not memory.sentences
    ):
        yield "stages=[memory_prune] needs what goes: memory.keep=N, memory.before=2026-01-31 or memory.sentences=[1,2]"
