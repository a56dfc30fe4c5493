"""The types of every option, and `load`, which checks a composed config once.

YAML holds values, this file holds types, units and ranges. A key exists once; what can be computed is not a key.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

STAGES = (
    "synthetic", "download", "patch", "mirror", "repack", "checksums", "spot_check", "residents", "quantize", "verify",
    "bench", "simulate", "chat", "serve", "plan", "doctor",
    "memory_ingest", "memory_ask", "memory_chat", "memory_list", "memory_stats", "memory_quote", "memory_verify",
    "memory_migrate", "memory_prune",
    "advise", "advise_check", "advise_serve",
)  # fmt: skip


# stages that a family has no use for, or that know nothing of it yet
NOT_FOR_FAMILY = {
    "qwen": {
        "mirror": "repack writes its experts to every drive of hw.drives",
        "checksums": "repack records them, in the pack",
        "quantize": "its experts are quantised as released",
    },
    "deepseek": {
        "quantize": "its weights are quantised as released",
        "repack": "its experts are read in the released shards as they are",
        "residents": "its weights are loaded from the released shards",
    },
    "qwen3_moe": {
        "quantize": "its experts are computed as they are released",
        "repack": "its experts are read in the released shards as they are",
        "residents": "its weights are loaded from the released shards",
        "verify": "no references of it are recorded yet",
    },
    "dense": {
        "repack": "its layers are read in the released shards as they are",
        "residents": "its weights are loaded from the released shards",
        "verify": "no references of it are recorded yet",
    },
}


class ConfigError(ValueError):
    """A key or value that cannot be used. The message says how to mend it."""


class Source(Enum):
    """Where a model's files come from."""

    bundled = "bundled"  # trained checkpoints inside this project
    local = "local"  # a snapshot folder given by model.path, used in place, never changed
    hub = "hub"  # the Hugging Face hub, at model.revision
    synthetic = (
        "synthetic"  # random bytes in the released names and shapes, made by the synthetic stage
    )


class DirectIo(Enum):
    """How expert files are opened."""

    auto = "auto"  # direct where the filesystem allows it, else through the page cache, said once
    require = "require"  # direct, or an error
    buffered = "buffered"  # through the page cache


class Spread(Enum):
    """How experts lie on several drives."""

    stripe = "stripe"  # each expert on one drive, by its share
    split = "split"  # a slice of each expert on every drive, by its share
    mirror = (
        "mirror"  # every expert on every drive: whichever would be first reads, and one may fail
    )


class ComputeDtype(Enum):
    """What residents and hidden states are computed in; sums are fp32 in any case."""

    auto = "auto"  # float32 on a CPU, bfloat16 on a GPU
    float32 = "float32"
    bfloat16 = "bfloat16"


class Deltanet(Enum):
    """How the large DeltaNet matrices are kept."""

    bf16 = "bf16"  # as released
    fp8_rows = (
        "fp8_rows"  # E4M3 with one scale per row: half the bytes, 2.6 % error on Gaussian rows
    )


class Weights(Enum):
    """How the matrices of a dense model's layers are kept."""

    stored = "stored"  # as released
    int8_rows = (
        "int8_rows"  # int8 with one scale per row: 8 bits a weight, 0.9 % error on Gaussian rows
    )
    nvfp4 = "nvfp4"  # E2M1 with an E4M3 scale for each 16: 4.5 bits a weight, 8.7 % error; the head as int8_rows


class Arithmetic(Enum):
    """Who computes a DeepSeek model."""

    auto = "auto"  # reference where its code, a GPU and TileLang are at hand, else native
    native = "native"  # this project, rounded where the release rounds
    reference = "reference"  # the release's own code, one line of it changed; experts streamed


class Kernels(Enum):
    """Whose kernels the release's own code runs on (arithmetic=reference)."""

    auto = "auto"  # tilelang on a GPU where a version that is not refused is installed, else ours
    tilelang = "tilelang"  # the release's
    ours = "ours"  # this project's: Triton on a GPU, plain torch on a CPU


class DraftSource(Enum):
    """Who guesses the next tokens."""

    auto = "auto"  # the checkpoint's draft heads where it has them, else look-up
    heads = "heads"  # the checkpoint's draft heads
    lookup = "lookup"  # what followed the conversation's last tokens when they stood there before; any model


class Head(Enum):
    """Who computes DeepSeek's logits when a GPU decodes; the weights, 1.3 GB, lie in RAM."""

    gpu = "gpu"  # it reads them over the link
    cpu = "cpu"
    auto = "auto"  # both at once, each as many rows as its measured rate allows


class Replay(Enum):
    """How a DeepSeek prompt goes through the later layers."""

    exact = "exact"  # every token through every layer
    bounded = "bounded"  # the last window of tokens only: approximate, as the official service does


@dataclass
class SamplingConfig:
    """Defaults of a request; the model's generation_config.json gives what is null here."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None  # keep the likeliest tokens up to this mass, (0, 1]
    top_k: int | None = None  # keep this many tokens; 0 is all
    min_p: float = 0.0  # drop tokens below this share of the likeliest one's probability
    seed: int | None = None  # same seed, same settings, same text


@dataclass
class SyntheticConfig:
    """A checkpoint of random bytes (source=synthetic): released names, dtypes and per-tensor shapes, fewer of them."""

    experts: int | None = (
        None  # per layer; null: as many as disk_gib allows, at most the released number
    )
    layers: int | None = None  # null: as released
    disk_gib: float = (
        60.0  # for all that the set-up makes of it: checkpoint, pack, residents, a quantised copy
    )
    ngram_rows: int = 2**20  # of each n-gram table, about; released: 320 million, 2 x 384 million
    skew: float = (
        0.5  # of the routing: standard deviation of the log of the router's row norms; 0 is even
    )
    seed: int = 0  # same seed and sizes, same bytes


@dataclass
class ModelConfig:
    """One model at one revision."""

    name: str = "???"
    family: str = "???"  # the file in runtime/models that computes it
    served_name: str = "???"  # its id over HTTP
    source: Source = Source.bundled
    path: str | None = None  # folder of the snapshot, for source=local and source=bundled
    repo: str | None = None  # hub id
    revision: str = "???"  # 40 hex digits on the hub; any text for a local folder
    # patterns of the files wanted; one with a slash is of a folder inside the snapshot
    files: list[str] = field(default_factory=lambda: ["*"])
    # patterns of tensors that are not needed: from the hub, shards of nothing else are not fetched; [] fetches all
    leave_out: list[str] = field(default_factory=list)
    files_gib: float | None = None  # of all wanted files, for plans before any is here
    released: str | None = None  # folder with this model's config.json, for the same purpose
    setup: list[str] = field(
        default_factory=list
    )  # stages that make what an engine opens, in order
    context_tokens: int = 4096  # window; memory for keys and values grows with it
    prefill_tokens: int = 512  # a prompt goes through the layers in pieces of this many tokens
    deltanet: Deltanet = Deltanet.bf16
    weights: Weights = Weights.stored  # of dense models; written once by stages=[quantize]
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def makers(self) -> tuple[str, ...]:
        """The stages that make what an engine opens: `setup`, and `quantize` where weights are not as released."""
        return (*self.setup, *(() if self.weights is Weights.stored else ("quantize",)))


@dataclass
class HubConfig:
    """How files come from the hub. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are read as by other tools."""

    files_at_once: int = 4  # files in flight; their bytes share the line
    stall_s: float = 30.0  # without bytes for this long a connection is closed and made anew
    retries: int = 8  # in a row without progress, with growing pauses; then an error
    line_mbit_s: float = 100.0  # the line that dry_run and plan reckon with


@dataclass
class DriveConfig:
    """How the drive is read."""

    direct: DirectIo = DirectIo.auto
    window: int | None = (
        None  # experts in flight; null: as many as come to 16 MiB, 2 to 8; 2 of several drives
    )
    pieces: int | None = (
        None  # parallel reads per expert; null: one for each 2 MiB, 1 to 4; 4 of several drives
    )
    piece_kib: int = 128  # but none smaller than this: below, a request costs more than its bytes
    simulate_gib_s: float = 0.0  # pretend the drive gives this many GiB/s; 0 is the real drive
    simulate_latency_us: float = 0.0  # and adds this much to every read
    process: bool | None = (
        None  # experts are read by a process of its own, the same bytes; null: with a GPU
    )


@dataclass
class DrivePlace:
    """One of several drives that experts are read from."""

    folder: str | None = None  # on it; null: where the set-up stages keep the experts anyway
    rate_gib_s: float | None = None  # as stages=[doctor] measures it; null: like the others
    share: float | None = None  # of what is striped or split, in relation; null: by rate_gib_s
    limit_gib: float | None = None  # written there at most; null: no limit
    simulate_gib_s: float | None = None  # null: hw.drive.simulate_gib_s


@dataclass
class RatesConfig:
    """How fast the machine is, for plans; null: what stages=[doctor] measured on this machine."""

    drive_gib_s: float | None = None  # whole experts, random, direct
    pcie_gib_s: float | None = None  # copies from pinned RAM to the GPU
    memory_gib_s: float | None = None  # reading where it is computed: the GPU's memory, or RAM


@dataclass
class HwConfig:
    """The machine, or the part of it that may be used."""

    name: str = "???"
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one
    dtype: ComputeDtype = ComputeDtype.auto
    # decode steps as CUDA graphs, the same numbers with all: true or segments, cut at each router, where the host
    # launches what follows; token, one for a whole token, in which the GPU waits for the experts; false or off, none
    graphs: bool | str = True
    graph_limit_s: float = (
        20.0  # that the GPU waits for experts with graphs=token; then the answer ends with an error
    )
    ram_gib: float | None = (
        None  # RAM that may be used in all; null: what this machine has available
    )
    vram_gib: float | None = (
        None  # video memory that may be used in all; null: what the card has free
    )
    reserve_gib: float = 1.0  # of ram_gib, left to everything else
    vram_reserve_gib: float = (
        0.6  # of vram_gib, left to the CUDA context, libraries and the display
    )
    pin_threads: bool = True  # with a GPU: decoding on one fast core, reader threads on the others
    compute_threads: int = 0  # threads of CPU arithmetic; 0: all cores but one, at most 8
    # with a GPU: of a layer's experts in RAM, the share that the CPU computes while the GPU reads the others: off, auto
    # (so that both end together, as measured) or 0 to 1; the same numbers but for the order of sums
    cpu_experts: str = "off"
    drive: DriveConfig = field(default_factory=DriveConfig)
    # several drives, as [{folder: /mnt/a}, {folder: /mnt/b, rate_gib_s: 2}]; []: one, where the set-up writes anyway
    drives: list[DrivePlace] = field(default_factory=list)
    spread: Spread = Spread.split  # of experts over hw.drives
    rates: RatesConfig = field(default_factory=RatesConfig)

    @property
    def has_graphs(self) -> bool:
        return self.graphs not in (False, "off")

    @property
    def token_limit_s(self) -> float | None:
        """Seconds that the GPU waits within the graph of a whole token; None: there is no such graph."""
        return self.graph_limit_s if self.graphs == "token" else None


class CachePolicy(Enum):
    """Who leaves a full expert cache in RAM."""

    lru = "lru"  # who was used longest ago
    lfu = "lfu"  # who is used least; a use counts half after as many uses as there are rows


@dataclass
class CacheConfig:
    """The RAM tier."""

    ram_gib: float | None = (
        None  # expert cache; 0: the layer in use and its guesses; null: all that the RAM plan leaves
    )
    vram_gib: float | None = (
        None  # expert slots in VRAM; 0: none but for copies on their way; null: all that is left
    )
    sweep_experts: int = 32  # experts read ahead while a prompt goes through a layer
    table_rows: int = 65536  # rows of n-gram tables kept in RAM
    policy: CachePolicy = CachePolicy.lru  # who leaves the RAM tier
    # chat and serve: read in the background what was warm when the last one ended (outputs/warm)
    warm_start: bool = False
    # compare each expert (not the drafts') with its recorded checksum the first time it is read
    verify: bool = False


@dataclass
class PrefetchConfig:
    """Reading ahead."""

    experts: int = 2  # guesses for the next layer, read from the drive in the gap; 0 is none
    copy: int = (
        0  # guesses for the next layer that are in RAM, copied to VRAM early (GPU); 0 is none
    )


@dataclass
class DraftsConfig:
    """Decoding with guesses that a pass of the model checks, greedy and sampled: the same tokens."""

    enabled: bool = False
    source: DraftSource = DraftSource.auto
    depth: int | None = (
        None  # guesses per pass at most; null: as many as the heads give, 4 of a look-up
    )
    gate: bool = (
        True  # learn which depth is fastest, 0 (off) among them; false: always drafts.depth
    )
    # tokens of the conversation's ending that are looked for in it, the largest number first
    ngrams: list[int] = field(default_factory=lambda: [4, 3, 2])
    ram_gib: float = 0.0  # of the heads' experts kept in RAM; 0: only those of the layer in use


@dataclass
class DeepseekConfig:
    """What only the deepseek family has."""

    arithmetic: Arithmetic = Arithmetic.auto
    replay: Replay = Replay.exact
    kernels: Kernels = Kernels.auto  # of arithmetic=reference
    head: Head = Head.gpu  # cpu and auto are equal to it within fp32 sums, not bit for bit
    head_share: float | None = (
        None  # head=auto: share of the head's rows that the CPU takes; null: measured at the start
    )
    fix_index_keys: bool = (
        False  # arithmetic=reference: at even positions its indexers read stale keys; true: own
    )


@dataclass
class ServeConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    queue: int = 8  # requests that may wait; one more gets 429
    replicas: int = 1  # servers behind this address, each on a machine of its own (Ray Serve)
    max_batch: int = 1  # conversations decoded together: an expert that several need is read once
    keep_alive_s: float = 10.0  # a comment frame this often while a stream is silent; 0 is never
    keep_alive_chunks: bool = False  # as empty chunks, for clients whose watchdogs count only those
    strict_model: bool = True  # false: any model name in a request means this model
    api_key: str | None = None  # that requests must send; better in a file, or in NVMOE_API_KEY
    api_key_file: str | None = None  # a file whose first line is the key
    open_metrics: bool = True  # /metrics without the key
    cors_origins: list[str] = field(
        default_factory=list
    )  # pages of other hosts that may use this server from a browser; ["*"]: all
    reasoning_alias: bool = False  # send `reasoning` beside `reasoning_content`


@dataclass
class SnapshotsConfig:
    """Copies of conversations' states while serving, that follow-ups go on from, also after a restart."""

    ram_gib: float | None = None  # 0: none; null: an eighth of what may be used, at most 1
    disk_gib: float = 4.0  # they hold the conversations' tokens; 0: none
    every_tokens: int = 2048  # a copy at least this often in a long prompt, in RAM alone; 0: none


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
    isolate: bool = (
        False  # true: what is taken in sees no window of the session before (retrieval may cross)
    )
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
    near_beyond: int | None = (
        None  # distance from which position=auto moves what is found near; null: 0.95 of the positions trained on
    )
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


@dataclass
class PathsConfig:
    """Places on the disk. Relative paths are taken from the folder of run.py."""

    outputs: str = "outputs"  # all that is made
    snapshots: str = "${paths.outputs}/snapshots"  # states of conversations; may be removed
    artifacts: str = (
        "${paths.outputs}/artifacts"  # what the set-up stages make; put it on the fastest drive
    )
    hub: str | None = (
        None  # files of the hub, laid out as its cache is; null: the folder that HF_HUB_CACHE or HF_HOME names
    )
    memory: str = "${paths.outputs}/memory"  # stores of the living memory


@dataclass
class SpotCheckConfig:
    """How many experts are read as an engine reads them, and compared."""

    experts: str = "64"  # how many random experts, or `all`
    seed: int = 0


@dataclass
class PatchConfig:
    """The release's own inference code, with one line changed."""

    allow_unknown: bool = (
        False  # take a file whose hash is not the known one; the line must be there
    )


@dataclass
class VerifyConfig:
    """How much `verify` computes."""

    documents: int = 40  # held-out documents per language; fewer, if a figure is recorded of fewer
    control_documents: int = 8  # of the English ones, for the runs with damage


@dataclass
class BenchConfig:
    """How `bench` measures."""

    tokens: int = 64  # decoded and counted, in each repeat
    warmup_tokens: int = 16  # decoded before, not counted
    repeats: int = 3
    prompt_length: int = 64  # tokens, read before decoding
    is_cold: bool = False  # empty the expert cache before each repeat, and count the warm-up in
    seed: int = 0  # of the prompt's tokens, or of generated routes
    plot: bool = True


class Policy(Enum):
    """Who leaves a full expert cache in the simulator: what cache.policy can be, and what it is compared with."""

    lru = "lru"
    lfu = "lfu"
    slru = "slru"  # segmented LRU
    per_layer = "per_layer"  # an LRU for each layer
    belady = "belady"  # who is wanted again last: knows the future, the bound


@dataclass
class SimulateConfig:
    """What `simulate` replays, and the machine it imagines.

    The drive is hw.drive.simulate_gib_s and simulate_latency_us, how it is read is hw.drive.window and pieces; how many
    tokens are counted, and decoded before, is bench.tokens and bench.warmup_tokens.
    """

    routes: str | None = None  # a recording (record=true); null: routes are generated as below
    policy: Policy | None = None  # null: cache.policy
    # the model, where routes are generated; a recording tells its own
    num_layers: int = 8
    num_experts: int = 64
    top_k: int = 6
    record_nbytes: int = 24576  # of one expert
    skew: float = 1.0  # standard deviation of the log of an expert's popularity; 0 is even
    persistence: float = 0.2  # share of experts kept from the token before
    recall: float = 0.68  # share of the next layer's experts that are guessed
    best_two: float = 0.87  # share of right ones among the first two guesses
    # the machine
    drive_depth: int = 32  # reads that the drive has in work at once
    is_shared: bool = False  # reads in work share the drive's rate; false: one after the other
    link_gib_s: float = 0.0  # from RAM to the GPU; 0: there is none, the CPU computes
    in_place_gib_s: float = 0.0  # the link, when kernels read RAM in place; 0: as fast as copies
    reads_in_place: bool = True  # experts in RAM are read where they are; false: copied first
    vram_gib_s: float = 0.0  # how fast a kernel reads an expert from VRAM; 0: in no time
    expert_us: float = 0.0  # at least this long computes one expert
    layer_us: float = 0.0  # computing of a layer beside its routed experts
    host_us: float = 0.0  # the host's own work for a layer, before its experts are launched
    host_after_us: float = 0.0  # the same behind the launch, while a GPU computes
    token_us: float = 0.0  # what a token needs once
    cpu_gib_s: float = 0.0  # at which the CPU computes experts in RAM beside a GPU; 0: it does not
    cpu_us: float = 0.0  # to start it for a layer
    ram_gib_s: float = 0.0  # of the RAM, for link, drives and CPU together; 0: enough for all
    head_nbytes: int = 0  # of a head in RAM that a GPU reads for every token; 0: it is in token_us
    head_cpu_gib_s: float = 0.0  # at which the CPU computes a part of it; 0: it does not


@dataclass
class SituationConfig:
    """What the advisor is told of a person's situation; null: not known, or assumed as conf/advisor says."""

    min_tok_s: float | None = None  # tokens a second that are fast enough
    context_tokens: float | None = None
    users: float | None = None  # at the same time
    country: str | None = None  # two letters, such as DE: prices of other countries do not count
    currency: str | None = None  # EUR, USD, GBP, CHF, JPY, PLN or CNY
    budget: float | None = None  # in that currency
    cloud_allowed: bool | None = None
    hours_day: float | None = None
    price_kwh: float | None = None
    horizon_months: float | None = None
    tokens_in_month: float | None = None
    tokens_out_month: float | None = None
    line_mbit: float | None = None
    accepts_smaller: bool | None = None
    language: str | None = None
    privacy: str | None = None
    noise: str | None = None
    use: str | None = None  # private or business


@dataclass
class AdviseConfig:
    """The hardware advisor."""

    question: str | None = None  # in plain words; numbers with units and names in it are heard
    model: str | None = None  # a model of conf/advisor/models.yaml; null: the one of model=
    variant: str | None = None  # of it; null: the first
    system: str | None = None  # a machine of conf/advisor/systems.yaml; null: the one of hw=
    as_of: str | None = None  # day that ages of prices are counted to; null: the knowledge base's
    situation: SituationConfig = field(default_factory=SituationConfig)
    plot: bool = True
    answer: str | None = None  # for stages=[advise_check]: file with the draft
    last_message: str | None = None  # for stages=[advise_check]: what the person wrote last
    searched_web: bool = False  # for stages=[advise_check]: the web was searched for the draft
    transport: str = "http"  # for stages=[advise_serve]: http or stdio
    host: str = "127.0.0.1"
    port: int = 8010


@dataclass
class DoctorConfig:
    """How long `doctor` measures the drive."""

    each_s: float = 0.8  # for each window and number of pieces
    sustained_s: float = 20.0  # with the best of them, to see a drive that throttles
    probe_gib: float = (
        1.0  # of a file that is made and deleted, while the model has none of its own
    )


@dataclass
class RunConfig:
    """Everything that one run is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hw: HwConfig = field(default_factory=HwConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    drafts: DraftsConfig = field(default_factory=DraftsConfig)
    deepseek: DeepseekConfig = field(default_factory=DeepseekConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    snapshots: SnapshotsConfig = field(default_factory=SnapshotsConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    spot_check: SpotCheckConfig = field(default_factory=SpotCheckConfig)
    patch: PatchConfig = field(default_factory=PatchConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    advise: AdviseConfig = field(default_factory=AdviseConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    stages: list[str] = field(
        default_factory=lambda: ["serve"]
    )  # what to run; set-up stages run first where needed
    force: Any = field(
        default_factory=list
    )  # stages to run again; true also lets serve start on a red verify
    dry_run: bool = False  # only say what would run, and why
    # false: start even where a drive seems too small, for filesystems that compress or grow
    check_disk: bool = True
    record: bool = (
        False  # bench, chat and serve write every route to routes.bin in the run's folder
    )
    # in a sweep: bench, chat and verify run one at a time on a machine, whatever launcher starts them
    measure_alone: bool = True
    prompt: str | None = None  # for stages=[chat]
    system: str | None = None  # system message for stages=[chat]
    thinking: bool = False  # for stages=[chat]: reason before the answer, where the model can
    effort: str | None = None  # of the thinking: a word that the model knows; null: its default
    max_tokens: int = 400  # of the answer, for stages=[chat]

    @property
    def forced_stages(self) -> list[str]:
        if isinstance(self.force, str):
            return [self.force]
        return list(self.force) if isinstance(self.force, list) else []

    @property
    def engine_stages(self) -> tuple[str, ...]:
        """Stages that make what an engine opens.

        Where experts are read in released shards: `mirror` with several drives, `checksums` with cache.verify.
        """
        names = list(self.model.makers)
        if "repack" in names:
            return tuple(names)
        if self.hw.drives:
            names.insert(names.index("download") + 1, "mirror")
        return (*names, *(["checksums"] if self.cache.verify else []))

    @property
    def is_forced(self) -> bool:
        return self.force is True


# key -> (smallest, largest): one place for all ranges
_RANGES: dict[str, tuple[float, float]] = {
    "model.context_tokens": (1, 2**24),
    "model.prefill_tokens": (1, 2**20),
    "model.sampling.temperature": (0, 2),
    "model.sampling.top_k": (0, 2**20),
    "model.sampling.min_p": (0, 1),
    "serve.max_batch": (1, 64),
    "deepseek.head_share": (0, 1),
    "serve.replicas": (1, 1024),
    "hw.drive.window": (1, 64),
    "hw.drive.pieces": (1, 64),
    "hw.drive.piece_kib": (4, 2**20),
    "hw.drive.simulate_gib_s": (0, 1000),
    "hw.drive.simulate_latency_us": (0, 1e6),
    "hw.rates.drive_gib_s": (0.001, 1e6),
    "hw.rates.pcie_gib_s": (0.001, 1e6),
    "hw.rates.memory_gib_s": (0.001, 1e6),
    "hw.ram_gib": (0.0625, 2**20),
    "hw.vram_gib": (0.25, 2**20),
    "hw.reserve_gib": (0, 2**20),
    "hw.vram_reserve_gib": (0, 2**20),
    "hw.compute_threads": (0, 1024),
    "hw.graph_limit_s": (0.01, 3600),
    "cache.ram_gib": (0, 2**20),
    "cache.vram_gib": (0, 2**20),
    "cache.sweep_experts": (1, 512),
    "cache.table_rows": (0, 2**31),
    "prefetch.experts": (0, 64),
    "prefetch.copy": (0, 64),
    "drafts.depth": (1, 64),
    "drafts.ram_gib": (0, 2**20),
    "model.synthetic.experts": (1, 2**16),
    "model.synthetic.layers": (1, 2**10),
    "model.synthetic.disk_gib": (0.001, 2**20),
    "model.synthetic.ngram_rows": (1, 2**40),
    "model.synthetic.skew": (0, 4),
    "doctor.each_s": (0.01, 3),
    "doctor.sustained_s": (0, 60),
    "doctor.probe_gib": (0.001, 64),
    "bench.tokens": (1, 2**20),
    "bench.warmup_tokens": (0, 2**20),
    "bench.repeats": (1, 1000),
    "bench.prompt_length": (1, 2**20),
    "model.files_gib": (0, 1e9),
    "hub.files_at_once": (1, 64),
    "hub.stall_s": (0.1, 3600),
    "hub.retries": (0, 1000),
    "hub.line_mbit_s": (0.001, 1e7),
    "simulate.num_layers": (1, 2**15),
    "simulate.num_experts": (1, 2**16),
    "simulate.top_k": (1, 2**10),
    "simulate.record_nbytes": (1, 2**40),
    "simulate.skew": (0, 10),
    "simulate.persistence": (0, 1),
    "simulate.recall": (0, 1),
    "simulate.best_two": (0, 1),
    "simulate.drive_depth": (1, 2**20),
    "simulate.link_gib_s": (0, 1e5),
    "simulate.in_place_gib_s": (0, 1e5),
    "simulate.vram_gib_s": (0, 1e5),
    "simulate.expert_us": (0, 1e9),
    "simulate.layer_us": (0, 1e9),
    "simulate.host_us": (0, 1e9),
    "simulate.host_after_us": (0, 1e9),
    "simulate.token_us": (0, 1e9),
    "simulate.cpu_gib_s": (0, 1e5),
    "simulate.cpu_us": (0, 1e9),
    "simulate.ram_gib_s": (0, 1e5),
    "simulate.head_nbytes": (0, 2**50),
    "simulate.head_cpu_gib_s": (0, 1e5),
    "memory.window": (64, 2**24),
    "memory.sinks": (0, 64),
    "memory.budget": (1, 2**24),
    "memory.recency_tail": (1, 2**24),
    "memory.chunk": (1, 2**16),
    "memory.block": (8, 4096),
    "memory.index_dim": (8, 4096),
    "memory.remove_pc": (0, 64),
    "memory.near_beyond": (1, 2**24),
    "memory.gap": (0, 2),
    "memory.min_sentence": (0, 128),
    "memory.confidence_target": (0, 1),
    "memory.calibration": (20, 10000),
    "memory.commit_tokens": (64, 2**20),
    "memory.ram_gib": (0, 2**20),
    "memory.k": (1, 1000),
    "memory.keep": (0, 2**40),
    "serve.port": (0, 65535),
    "serve.queue": (0, 10000),
    "serve.keep_alive_s": (0, 3600),
    "snapshots.ram_gib": (0, 2**20),
    "snapshots.disk_gib": (0, 2**20),
    "snapshots.every_tokens": (0, 2**24),
    "verify.documents": (1, 1e6),
    "verify.control_documents": (1, 1e6),
    "advise.port": (0, 65535),
    "advise.situation.min_tok_s": (0, 1e6),
    "advise.situation.context_tokens": (1, 2**24),
    "advise.situation.users": (1, 1e6),
    "advise.situation.budget": (0, 1e9),
    "advise.situation.hours_day": (0, 24),
    "advise.situation.price_kwh": (0, 1e3),
    "advise.situation.horizon_months": (1, 1200),
    "advise.situation.tokens_in_month": (0, 1e15),
    "advise.situation.tokens_out_month": (0, 1e15),
    "advise.situation.line_mbit": (0, 1e7),
    "max_tokens": (1, 2**24),
}


_GRAPHS = ("off", "segments", "token")


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the sentence that ends an unknown-name message: the nearest right name, then the list."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}known: {', '.join(known)}"


def known_keys(cls: type = RunConfig, prefix: str = "") -> dict[str, bool]:
    """Return every dotted key of the schema; the value says whether it is a group of keys."""
    keys: dict[str, bool] = {}
    for f in fields(cls):
        default = f.default_factory() if callable(f.default_factory) else f.default
        keys[prefix + f.name] = is_dataclass(default)
        if is_dataclass(default):
            keys |= known_keys(type(default), f"{prefix}{f.name}.")
    return keys


def load(cfg: DictConfig) -> RunConfig:
    """Check and convert the composed config; nothing below this line sees Hydra.

    Raises ConfigError with every fault that was found, one sentence each.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        raw = OmegaConf.to_container(cfg, resolve=True)
        assert isinstance(raw, dict)
        unknown = _unknown_keys(raw)
        if unknown:
            raise ConfigError("; ".join(unknown))
        run = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    assert isinstance(run, RunConfig)
    checks = (
        _range_faults,
        _drives_faults,
        _family_faults,
        _drafts_faults,
        _batch_faults,
        _cpu_experts_faults,
        _weight_faults,
        _memory_faults,
        _stage_faults,
    )
    faults = [fault for check in checks for fault in check(run)]
    if faults:
        raise ConfigError("; ".join(faults))
    return run


def _unknown_keys(raw: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """`+model.topk=3`, which Hydra's own message suggests, would otherwise pass and be ignored."""
    known = known_keys()
    found = []
    for key, value in raw.items():
        dotted = f"{prefix}{key}"
        if dotted not in known:
            level = [
                k.removeprefix(prefix)
                for k in known
                if k.startswith(prefix) and "." not in k.removeprefix(prefix)
            ]
            found.append(f"unknown key {dotted!r}: {nearest(str(key), level)}")
        elif known[dotted] and isinstance(value, Mapping):
            found += _unknown_keys(value, f"{dotted}.")
    return found


def _range_faults(run: RunConfig) -> Iterable[str]:
    for key, (low, high) in _RANGES.items():
        value: Any = run
        for part in key.split("."):
            value = getattr(value, part)
        if value is None:
            continue
        if not math.isfinite(value) or value < low:
            yield f"{key} must be at least {low:g}, got {value:g}"
        elif value > high:
            yield f"{key} must be at most {high:g}, got {value:g}"
    top_p = run.model.sampling.top_p
    if top_p is not None and not 0 < top_p <= 1:
        yield f"model.sampling.top_p must be above 0 and at most 1, got {top_p:g}"
    threads = (run.hw.drive.window or 1) * (run.hw.drive.pieces or 1)
    if threads > 256:
        yield f"hw.drive.window x hw.drive.pieces makes {threads} reader threads, at most 256"
    if run.model.source is Source.hub and not run.model.repo:
        yield "model.source=hub needs model.repo, as ORG/NAME on the hub"
    if run.advise.transport not in ("http", "stdio"):
        known = nearest(run.advise.transport, ("http", "stdio"))
        yield f"advise.transport {run.advise.transport!r} is unknown: {known}"
    if run.hw.device not in ("auto", "cpu", "cuda"):
        yield f"hw.device {run.hw.device!r} is unknown: {nearest(run.hw.device, ('auto', 'cpu', 'cuda'))}"
    if not isinstance(run.hw.graphs, bool) and run.hw.graphs not in _GRAPHS:
        yield f"hw.graphs {run.hw.graphs!r} is unknown: {nearest(run.hw.graphs, ('true', 'false', *_GRAPHS))}"
    if run.spot_check.experts != "all" and not run.spot_check.experts.isdecimal():
        yield f"spot_check.experts must be a number or all, got {run.spot_check.experts!r}"
    if run.prompt is not None and not run.prompt.strip():
        yield 'the prompt is empty: give it as prompt="..."'


def _drives_faults(run: RunConfig) -> Iterable[str]:
    drives = run.hw.drives
    if len(drives) == 1:
        yield "hw.drives has one drive: name two or more, or leave it out"
    if drives and "repack" not in run.model.setup and run.hw.spread is not Spread.mirror:
        yield (
            f"hw.spread={run.hw.spread.value} packs experts anew, and model={run.model.name} reads them in the "
            "released shards: set hw.spread=mirror"
        )
    if drives and run.hw.drive.process:
        yield "hw.drive.process reads from one drive, not from hw.drives: leave one of them out"
    if drives and run.model.weights is not Weights.stored:
        yield (
            f"hw.drives has copies of released shards, not of model.weights={run.model.weights.value}: leave one of "
            "them out"
        )
    limits = {"rate_gib_s": 1e6, "share": 1e6, "limit_gib": 2.0**20, "simulate_gib_s": 1000.0}
    for i, drive in enumerate(drives):
        for key, most in limits.items():
            value = getattr(drive, key)
            least = 0.0 if key == "simulate_gib_s" else 1e-6
            if value is not None and not least <= value <= most:
                yield f"hw.drives[{i}].{key} must be {least:g} to {most:g}, got {value:g}"
    for key in ("rate_gib_s", "share"):
        given = [getattr(drive, key) is not None for drive in drives]
        if any(given) and not all(given):
            yield f"hw.drives[{given.index(False)}].{key} is missing: give it for every drive, or for none"
    threads = len(drives) * (run.hw.drive.window or 1) * (run.hw.drive.pieces or 1)
    if len(drives) > 1 and threads > 256:
        yield f"{len(drives)} drives x hw.drive.window x pieces make {threads} reader threads, at most 256"


def _memory_faults(run: RunConfig) -> Iterable[str]:
    wanted = [name for name in run.stages if name.startswith("memory_")]
    if not wanted:
        return
    memory, name = run.memory, wanted[0]
    if memory.store is None:
        yield f"stages=[{name}] needs a store: add memory.store=NAME"
    if name == "memory_ingest" and memory.file is None:
        yield "stages=[memory_ingest] needs a text: add memory.file=notes.txt"
    if (
        name in ("memory_ask", "memory_chat", "memory_quote")
        and not (memory.question or "").strip()
    ):
        yield f'stages=[{name}] needs a question: add memory.question="..."'
    if 4096 % memory.block:
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


def _drafts_faults(run: RunConfig) -> Iterable[str]:
    drafts = run.drafts
    if not drafts.ngrams or not all(1 <= length <= 64 for length in drafts.ngrams):
        yield f"drafts.ngrams are numbers of tokens, 1 to 64 each, at least one, got {drafts.ngrams}"
    if not drafts.enabled:
        return
    if run.record:
        yield "record=true writes what single tokens ask for: leave out drafts.enabled, or record"
    plain = [name for name in run.stages if name.startswith("memory_") or name == "simulate"]
    if plain:
        yield f"stages=[{plain[0]}] knows no drafts: leave out drafts.enabled"


def _batch_faults(run: RunConfig) -> Iterable[str]:
    if run.serve.max_batch == 1:
        return
    if run.drafts.enabled:
        yield "drafts are for one conversation at a time: leave out drafts.enabled or serve.max_batch"
    if run.record:
        yield "record=true writes the routes of one conversation at a time: leave out record or serve.max_batch"


def _cpu_experts_faults(run: RunConfig) -> Iterable[str]:
    wanted = run.hw.cpu_experts
    if wanted == "off":
        return
    if wanted != "auto" and not _is_share(wanted):
        yield f"hw.cpu_experts is off, auto or a share from 0 to 1, got {wanted!r}"
    if run.model.family not in ("qwen", "deepseek"):
        yield (
            f"hw.cpu_experts is of models with FP4 experts, model={run.model.name} is of the family "
            f"{run.model.family}: leave it out"
        )
    if run.hw.device == "cpu":
        yield "hw.cpu_experts shares experts between GPU and CPU, and hw.device is cpu: leave out one of the two"
    if run.serve.max_batch > 1:
        yield "hw.cpu_experts is for one conversation at a time: leave out hw.cpu_experts or serve.max_batch"
    if run.hw.graphs == "token":
        yield "hw.cpu_experts needs the host between router and experts: leave it out, or set hw.graphs=true"


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _family_faults(run: RunConfig) -> Iterable[str]:
    if run.deepseek.arithmetic is not Arithmetic.reference:
        return
    if run.deepseek.head is not Head.gpu:
        yield "deepseek.head is of deepseek.arithmetic=native: leave out one of the two"
    if "patch" not in run.model.setup:
        yield (
            "deepseek.arithmetic=reference needs the release's own code, and "
            f"model={run.model.name} comes without it: set deepseek.arithmetic=native"
        )
    if run.deepseek.replay is not Replay.exact:
        yield "deepseek.replay=bounded is of deepseek.arithmetic=native: leave out one of the two"
    if run.drafts.enabled:
        yield "drafts are of deepseek.arithmetic=native: leave out drafts.enabled, or set that"
    if run.hw.cpu_experts != "off":
        yield "hw.cpu_experts is of deepseek.arithmetic=native: leave out hw.cpu_experts, or set that"


def _weight_faults(run: RunConfig) -> Iterable[str]:
    is_dense, is_stored = run.model.family == "dense", run.model.weights is Weights.stored
    if not is_stored and not is_dense:
        yield (
            f"model.weights={run.model.weights.value} is of dense models, model={run.model.name} is of the family "
            f"{run.model.family}: leave it out"
        )
    if not is_stored and run.cache.verify:
        yield "cache.verify compares layers as they are released: leave it out, or leave out model.weights"
    if is_stored and is_dense and "quantize" in run.stages:
        yield "stages=[quantize] needs a format: add model.weights=int8_rows or model.weights=nvfp4"


def _stage_faults(run: RunConfig) -> Iterable[str]:
    if not isinstance(run.force, (bool, list, str)):
        yield f"force must be a list of stages or true, got {run.force!r}"
    for key, names in (
        ("stages", run.stages),
        ("force", run.forced_stages),
        ("model.setup", run.model.setup),
    ):
        for name in names:
            if name not in STAGES:
                yield f"unknown stage {name!r} in {key}: {nearest(str(name), STAGES)}"
    for name, why in NOT_FOR_FAMILY.get(run.model.family, {}).items():
        if name in run.stages:
            yield f"stages=[{name}] is not for model={run.model.name}: {why}; try stages=[chat] or stages=[bench]"
    if not run.stages:
        yield "stages is empty: name at least one, for instance stages=[chat]"
    if "advise_check" in run.stages and run.advise.answer is None:
        yield "stages=[advise_check] needs a draft: add advise.answer=FILE"
    if "chat" in run.stages and run.prompt is None:
        yield 'stages=[chat] needs a prompt: add prompt="..."'
