"""Options: every yaml composes, wrong keys and values are refused with the right name, and free text stays as typed."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict

import run
from conf.schema import STAGES, ConfigError, Deltanet, RunConfig, Source, known_keys, load
from conf.schema.checks import RANGES
from runtime.errors import UsageError, UserError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir() and folder.name not in ("local", "advisor") and any(folder.glob("*.yaml"))
}


@pytest.fixture(scope="module", autouse=True)
def _hydra():
    ConfigStore.instance().store(name="schema", node=RunConfig)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@functools.cache
def _composed(*overrides: str):
    return compose("config", run.prepare(list(overrides)))


def composed(*overrides: str):
    """Return a fresh composed config, as Hydra hands it to the task."""
    return copy.deepcopy(_composed(*overrides))


def loaded(*overrides: str) -> RunConfig:
    return load(composed(*overrides))


# ---- files -------------------------------------------------------------------------------------------------------


def test_the_groups_are_those_of_the_readme_command():
    assert {"model", "hw", "cache", "prefetch", "serve"} <= set(GROUPS)


def combinations() -> list[dict[str, str]]:
    """Return few combinations of choices in which every two choices of different groups meet."""

    def pairs(combination: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
        return {frozenset(pair) for pair in itertools.combinations(combination.items(), 2)}

    every = [dict(zip(GROUPS, words, strict=True)) for words in itertools.product(*GROUPS.values())]
    left = set().union(*map(pairs, every))
    chosen = []
    while left:
        chosen.append(max(every, key=lambda combination: len(pairs(combination) & left)))
        left -= pairs(chosen[-1])
    return chosen


@pytest.mark.parametrize("choices", combinations(), ids=lambda c: "-".join(c.values()))
def test_every_yaml_composes_with_every_other(choices):
    cfg = loaded(*(f"{group}={choice}" for group, choice in choices.items()))
    for group, choice in choices.items():
        section = OmegaConf.to_container(OmegaConf.structured(getattr(cfg, group)))
        for key, value in yaml.safe_load((CONF / group / f"{choice}.yaml").read_text()).items():
            assert getattr(section[key], "value", section[key]) == value, f"{group}.{key}"


def test_a_plain_run_sets_up_and_serves_the_bundled_model():
    cfg = loaded()
    assert (cfg.model.name, cfg.stages) == ("tiny", ["serve"])
    assert cfg.serve.host == "127.0.0.1", "nothing is offered to the network unasked"
    assert (ROOT / cfg.model.path / "config.json").is_file()


@pytest.mark.parametrize("choice", GROUPS["model"])
def test_models_are_pinned(choice):
    model = loaded(f"model={choice}").model
    assert model.name == choice, "artifacts are kept under the name that is typed"
    assert set(model.setup) <= set(STAGES)
    assert (ROOT / "runtime" / "models" / f"{model.family}.py").is_file()
    if model.source is Source.hub:
        assert re.fullmatch("[0-9a-f]{40}", model.revision), "a branch moves, a commit does not"
        assert model.repo
    if model.source is Source.bundled:
        assert (ROOT / model.path).is_dir()


def test_every_stage_has_its_file():
    for stage in STAGES:
        assert (ROOT / "stages" / f"{stage}.py").is_file(), stage


# ---- keys --------------------------------------------------------------------------------------------------------


def test_no_two_keys_mean_the_same():
    """One name for one thing; the same last word twice needs a reason, stated here."""
    reasons = {
        "name": "of a model, of a machine",
        "source": "of a model's files, of guesses",
        "seed": "of sampling, of the choice of experts to check, of random weights, of a bench's prompt",
        "ram_gib": "of the machine, of the cache, of the drafts' experts, of copies of conversations, of cold blocks",
        "disk_gib": "of a synthetic model, of copies of conversations",
        "vram_gib": "of the machine, of the cache",
        "host": "of the model's server, of the advisor's",
        "port": "of the model's server, of the advisor's",
        "plot": "of a bench, of an advice",
        "system": "the system message, the machine asked about",
        "context_tokens": "of the model, of a person's texts",
        "top_k": "of sampling, of imagined layers",
        "skew": "of a synthetic router, of generated routes",
        "window": "experts in flight, tokens kept hot",
        "budget": "of tokens for a question, of money",
        "question": "to a memory, to the advisor",
        "policy": "of the cache, of an imagined one",
        "experts": "guesses to read, experts to check, experts of a synthetic layer",
    }
    seen: dict[str, list[str]] = {}
    for key, is_group in known_keys().items():
        if not is_group:
            seen.setdefault(key.rpartition(".")[2], []).append(key)
    twice = {word: keys for word, keys in seen.items() if len(keys) > 1}
    assert set(twice) <= set(reasons), twice
    assert all(len(keys) == len(reasons[word].split(", ")) for word, keys in twice.items())


def test_every_key_with_a_unit_says_it():
    for key in known_keys():
        assert not re.search(r"(_gb|_mb|_ms|_sec|timeout|size)$", key), key


@pytest.mark.parametrize("prefix", ["", "+", "++", "~"])
@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("model.sampling.topk", "model.sampling.top_k"),
        ("cache.ram_gb", "cache.ram_gib"),
        ("promt", "prompt"),
        ("stage", "stages"),
        ("hw.drive.windw", "hw.drive.window"),
        ("sampling.top_k", None),
        ("model.sampling.top_k.x", None),
        ("schema", None),  # conf/schema is a folder of types, no group of choices
    ],
)
def test_unknown_keys_on_the_command_line(prefix, key, nearest):
    with pytest.raises(UsageError) as caught:
        run.prepare([f"{prefix}{key}=3"])
    assert key in caught.value.message
    assert caught.value.exit_code == 2
    if nearest:
        assert f"did you mean {nearest!r}?" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("model.sampling.topk", "top_k"),
        ("cache.ram_gb", "ram_gib"),
        ("promt", "prompt"),
        ("hw.drive.windw", "window"),
    ],
)
def test_unknown_keys_in_a_composed_config(key, nearest):
    """As a yaml in conf/local, or Hydra's own `+key=value`, would bring them in."""
    cfg = OmegaConf.create(OmegaConf.to_container(composed()))
    with open_dict(cfg):
        OmegaConf.update(cfg, key, 3)
    with pytest.raises(ConfigError, match=f"unknown key '{key}': did you mean '{nearest}'"):
        load(cfg)


def test_all_unknown_keys_are_listed_together():
    cfg = OmegaConf.create(OmegaConf.to_container(composed()))
    cfg.promt, cfg.hw.devise = "x", "cpu"
    with pytest.raises(ConfigError, match=r"hw\.devise.*; .*promt|promt.*; .*hw\.devise"):
        load(cfg)


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_unknown_choices(group):
    wrong = GROUPS[group][0] + "x"
    with pytest.raises(UsageError) as caught:
        run.prepare([f"{group}={wrong}"])
    assert caught.value.message == f"there is no {group}={wrong}"
    assert f"did you mean {GROUPS[group][0]!r}?" in caught.value.hint
    assert all(choice in caught.value.hint for choice in GROUPS[group])


def test_one_wrong_choice_among_those_of_a_sweep():
    with pytest.raises(UsageError, match="there is no cache=nonne"):
        run.prepare(["-m", "cache=lru,nonne"])
    assert run.prepare(["-m", "cache=lru,none"]) == ["-m", "cache=lru,none"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--cfg", "job"],
        ["-c", "job"],
        ["--config-dir", "conf"],
        ["-cd", "conf"],
        ["--config-name", "config"],
        ["--package", "hw"],
        ["--info", "searchpath"],
        ["--help"],
        ["-m", "hydra.verbose=true"],
    ],
)
def test_hydras_own_options_pass(argv):
    assert run.prepare(argv) == argv


# ---- values ------------------------------------------------------------------------------------------------------


def _with(key: str, value: object) -> RunConfig:
    cfg = composed()
    OmegaConf.update(cfg, key, value)
    return load(cfg)


@pytest.mark.parametrize("key", sorted(RANGES))
def test_ranges(key):
    low, high = RANGES[key]
    is_whole = "float" not in str(_type_of(key))
    for value in (low, high):
        _with(key, int(value) if is_whole else value)
    below, above = (low - 1, high + 1) if is_whole else (low - 0.03125, high * 1.5)
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} must be at least .*, got "):
        _with(key, int(below) if is_whole else below)
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} must be at most .*, got "):
        _with(key, int(above) if is_whole else above)


def _type_of(key: str) -> object:
    section, _, name = key.rpartition(".")
    node = RunConfig()
    for part in filter(None, section.split(".")):
        node = getattr(node, part)
    return type(node).__annotations__[name]


@pytest.mark.parametrize(
    ("value", "has_graphs", "limit_s"),
    [
        ("true", True, None),
        ("segments", True, None),
        ("false", False, None),
        ("off", False, None),
        ("token", True, 3.0),
    ],
)
def test_graphs_are_switched_or_named(value: str, has_graphs: bool, limit_s: float | None):
    hw = loaded(f"hw.graphs={value}", "hw.graph_limit_s=3").hw
    assert (hw.has_graphs, hw.token_limit_s) == (has_graphs, limit_s)


def test_a_wrong_word_for_graphs_names_the_right_ones():
    with pytest.raises(ConfigError, match=r"hw\.graphs 'tokens' is unknown: did you mean 'token'"):
        loaded("hw.graphs=tokens")


def test_every_number_has_a_range():
    """A key that is a number and may be anything is a key that nobody thought about."""
    seeds = {
        f"{group}.seed" for group in ("model.sampling", "model.synthetic", "spot_check", "bench")
    }
    # any; its own; checked against each other, or the store's
    free = seeds | {
        "model.sampling.top_p",
        "memory.index_layers",
        "memory.sentences",
        "drafts.ngrams",
    }
    numbers = {
        key
        for key, is_group in known_keys().items()
        if not is_group and re.search(r"\b(int|float)\b", str(_type_of(key)))
    }
    assert numbers - free == set(RANGES)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "key", ["model.sampling.temperature", "hw.ram_gib", "cache.ram_gib", "serve.keep_alive_s"]
)
def test_numbers_that_are_none(key, value):
    with pytest.raises(ConfigError, match=re.escape(key)):
        _with(key, value)


@pytest.mark.parametrize("value", [0, -0.1, 1.01, float("nan")])
def test_top_p(value):
    with pytest.raises(ConfigError, match="top_p must be above 0 and at most 1"):
        _with("model.sampling.top_p", value)
    assert _with("model.sampling.top_p", 1).model.sampling.top_p == 1


def test_several_faults_are_listed_together():
    with pytest.raises(ConfigError) as caught:
        loaded(
            "hw.drive.window=0", "max_tokens=0", "stages=[chta,chat]", "hw.device=gpu",
            "spot_check.experts=some", "model.sampling.top_p=2",
        )  # fmt: skip
    message = str(caught.value)
    for part in (
        "hw.drive.window must be at least 1, got 0",
        "max_tokens must be at least 1, got 0",
        "unknown stage 'chta' in stages: did you mean 'chat'?",
        "needs a prompt",
        "hw.device 'gpu' is unknown",
        "spot_check.experts must be a number or all, got 'some'",
        "top_p",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["drafts.ngrams=[]"], "drafts.ngrams are numbers of tokens, 1 to 64 each"),
        (["drafts.ngrams=[3,0]"], "drafts.ngrams are numbers of tokens, 1 to 64 each"),
        (["stages=[bench]", "bench.acceptance=0.7"], "nobody guesses: add drafts.enabled=true"),
        (["drafts.enabled=true", "bench.acceptance=7"], "bench.acceptance must be at most 1, got 7"),
        (["drafts.enabled=true", "record=true"], "record=true writes what single tokens ask for"),
        (["drafts.enabled=true", "stages=[simulate]"], "stages=[simulate] knows no drafts"),
        (["drafts.enabled=true", "deepseek.arithmetic=reference"], "are of deepseek.arithmetic=native"),
    ],
)  # fmt: skip
def test_drafts_that_cannot_be(argv, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        load(composed(*argv))


def test_too_many_reader_threads():
    with pytest.raises(ConfigError, match="makes 4096 reader threads, at most 256"):
        loaded("hw.drive.window=64", "hw.drive.pieces=64")
    assert loaded("hw.drive.window=64", "hw.drive.pieces=4").hw.drive.pieces == 4


def test_enums():
    cfg = loaded("model.deltanet=fp8_rows", "model.source=local", "hw.drive.direct=buffered")
    assert cfg.model.deltanet is Deltanet.fp8_rows
    assert cfg.model.source is Source.local
    raw = OmegaConf.create(OmegaConf.to_container(composed()))
    raw.model.deltanet = "fp9"
    with pytest.raises(ConfigError, match="bf16, fp8_rows"):
        load(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_tokens", "many"), ("model", None), ("stages", "chat"), ("paths.outputs", "${nothing}")],
)
def test_wrong_types_in_a_plain_config(key, value):
    raw = OmegaConf.create(OmegaConf.to_container(composed()))
    OmegaConf.update(raw, key, value)
    with pytest.raises(ConfigError):
        load(raw)


@pytest.mark.parametrize("force", ["true", "false", "[]", "[repack]", "[repack,verify]", "repack"])
def test_force_as_it_may_be_written(force):
    cfg = loaded(f"force={force}")
    assert cfg.is_forced == (force == "true")
    assert cfg.forced_stages == [s for s in ("repack", "verify") if s in force]


@pytest.mark.parametrize("force", ["[repak]", "repak", "1", "null"])
def test_force_as_it_may_not(force):
    with pytest.raises(ConfigError, match="force"):
        loaded(f"force={force}")


def test_chat_needs_a_prompt():
    with pytest.raises(ConfigError, match=r'add prompt="\.\.\."'):
        loaded("stages=[chat]")
    for empty in ("prompt=", "prompt= ", "prompt=\n\t"):
        with pytest.raises(ConfigError, match="the prompt is empty"):
            loaded("stages=[chat]", empty)
    with pytest.raises(ConfigError, match="stages is empty"):
        loaded("stages=[]")


def test_loading_leaves_the_composed_config_alone():
    cfg = composed("prompt=a ${b}")
    before = copy.deepcopy(cfg)
    load(cfg)
    assert cfg == before


# ---- free text ---------------------------------------------------------------------------------------------------


def read_back(key: str, text: str) -> str:
    """Return what Hydra makes of `key=text` after our quoting: its own parser, then OmegaConf's resolution."""
    (word,) = run.prepare([f"{key}={text}"])
    override = OverridesParser.create().parse_override(word)
    assert override.key_or_group == key
    return OmegaConf.create({"value": override.value()}).value


# a text that is a quoted string by Hydra's grammar is taken as one: that is what Hydra's documentation asks for
_IS_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_texts = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1),
    st.text(st.sampled_from("\\'\"${}=,[]()#:~+@ \n\tab"), min_size=1),
).filter(lambda text: text not in ("null", "???") and not _IS_QUOTED.fullmatch(text))


@settings(max_examples=300, deadline=None)
@example("Tell me a story, please: a=b, [c], {d}, (e) # f")
@example('He said "no".')
@example('"Yes" or "no"?')
@example("'tis the season, y'all'")
@example("a\\")
@example('a\\"')
@example('\\\\"\\')
@example("'")
@example('"')
@example("costs ${price}")
@example("costs \\${price}")
@example("costs \\\\${price}")
@example("$${a}")
@example("two\nlines\n")
@example(" spaces around ")
@example("Привет, мир! 你好 🦊")
@example("true")
@example("3.50")
@example("key: value")
@given(_texts)
def test_free_text_is_taken_as_it_is_typed(text):
    assert read_back("prompt", text) == text


@pytest.mark.parametrize("key", run.FREE_TEXT)
@pytest.mark.parametrize(
    "path",
    [
        "/data/新卷/m", "/data/a=b", "/data/my models", "/data/a,b", "/data/a#1", "/data/(x)",
        "/data/[x]{y}", "/data/it's", '/data/"q"', "/data/a:b", "/data/$HOME", "~/models", "/data/моё",
        "/data/a\\b", "/data/*?!", "/data/a@b%c&d|e;f",
    ],
)  # fmt: skip
def test_paths_with_odd_characters(key, path):
    assert read_back(key, path) == path


def test_every_text_key_of_a_person_is_free_text():
    """Keys that hold a sentence, a secret or a path of somebody's machine."""
    memory = {f"memory.{name}" for name in ("store", "file", "question", "session", "tag", "scope")}
    advise = {
        f"advise.{name}" for name in ("question", "model", "system", "answer", "last_message")
    }
    others = {
        key for key in known_keys() if re.search(r"(^|\.)(path|routes)$|^paths\.|api_key", key)
    }
    assert set(run.FREE_TEXT) == {"prompt", "system", *others, *memory, *advise}


def test_null_and_quoted_texts_mean_what_they_mean_to_hydra():
    assert read_back("prompt", "null") is None
    assert read_back("prompt", "'a, b'") == "a, b"
    assert loaded("system=null").system is None


def test_the_whole_way_into_the_config():
    text = "Say \"${x}\", then 'y' = {z}, [1,2] # ok\n\\ Привет"
    cfg = loaded(f"prompt={text}", "stages=[chat]", "paths.outputs=/data/a=b, (c) ${d}")
    assert cfg.prompt == text
    assert cfg.paths.outputs == "/data/a=b, (c) ${d}"
    assert cfg.paths.artifacts == "/data/a=b, (c) ${d}/artifacts"


@pytest.mark.parametrize("path", ["a=b", "with space", "新", "a,b", "it's", 'q"q', "${x}"])
def test_the_output_folder_is_checked_where_it_really_is(tmp_path, path):
    (tmp_path / "file").write_text("")
    run.prepare([f"paths.outputs={tmp_path / path}"])
    with pytest.raises(UserError) as caught:
        run.prepare([f"paths.outputs={tmp_path / 'file' / path}"])
    assert f"the output folder {tmp_path / 'file' / path} cannot be written" in str(caught.value)


def test_bytes_that_are_no_utf8():
    with pytest.raises(UsageError, match=r"b'prompt=\\xff\\xfe' is not valid UTF-8"):
        run.prepare([b"prompt=\xff\xfe".decode("utf-8", "surrogateescape")])


# ---- the command line without the engine -------------------------------------------------------------------------


def test_help_needs_no_torch():
    code = (
        "import sys, run\ntry:\n run.main(['--help'])\nfinally:\n sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for word in (
        *GROUPS,
        "tiny",
        "qwen",
        "context_tokens",
        "ram_gib",
        "python run.py stages=[chat]",
    ):
        assert word in done.stdout
    assert "schema" not in done.stdout, "a folder of types is no group of choices"
    assert "\033" not in done.stdout
