"""The validator: right answers pass, and each kind of mistake is named by its code."""

from __future__ import annotations

import dataclasses
import random

import pytest
from advisor_drafts import NO, PROSE, base, calc, path, right
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.advisor import lang
from runtime.advisor.check_text import numbers_in
from runtime.advisor.facts import situation_of
from runtime.advisor.slips import slip_name
from runtime.advisor.validator import answer_text, check_answer

ASKED = {
    "en": "Which computer do I need to run this model at home, and what is the best way to do it with what I have for now?",
    "de": "Welchen Rechner brauche ich für das Modell zu Hause, und was ist der beste Weg mit dem, was ich im Moment habe?",
    "ru": "Какой компьютер мне нужен, чтобы эта модель работала дома, и как это сделать с тем, что у меня есть сейчас?",
}  # fmt: skip

RIGHT = [
    (model, machine, "en", {})
    for model in ("deepseek", "qwen", "llama-70b", "llama-8b", "Qwen3-30B-A3B")
    for machine in ("rtx5060", "4070-32", "laptop", "unified-36", "athlon-3060")
] + [
    ("deepseek", "rtx5060", "de", {}),
    ("deepseek", "rtx5060", "ru", {}),
    ("deepseek", "rtx5060", "en", {"min_tok_s": 2.0, "budget": 2000.0, "currency": "EUR", "country": "DE"}),
    ("deepseek", "rtx5060", "en", {"cloud_allowed": False}),
    ("qwen", "rtx5060", "de", {"hours_day": 3.0, "price_kwh": 0.25}),
    ("qwen", "rtx5060", "en", {"context_tokens": 32768.0, "users": 8.0}),
    ("llama-70b", "rtx5060", "en", {"min_tok_s": 10.0}),
    ("DeepSeek-V3", "rtx5060", "en", {"accepts_smaller": False}),
    ("qwen", "dgx-spark", "en", {}),
    ("llama-70b", "dgx-spark", "de", {"min_tok_s": 4.0}),
    ("deepseek", "rtx5060", "en", {"currency": "USD", "cloud_allowed": True, "tokens_in_month": 10e6, "tokens_out_month": 2e6, "price_kwh": 0.3}),
]  # fmt: skip


def check(block, prose, asked=None, **more):
    return check_answer(base(), answer_text(block, prose), last_user_message=ASKED["en"] if asked is None else asked, **more)  # fmt: skip


@pytest.mark.parametrize(("model", "machine", "language", "situation"), RIGHT)
def test_right_answers_pass(model, machine, language, situation):
    block, prose = right(model, machine, language, **situation)
    found = check(block, prose, ASKED[language])
    assert found["errors"] == []
    assert len(found["paths_walked"]) == 12
    assert len(RIGHT) >= 30


# ---- one mistake each: (name, code, what is done to (block, prose); None leaves the prose) ---------------------------


def _scale(law, factor):
    def mutate(block, prose):
        calc(block, law)["result"]["value"] *= factor

    return mutate


def _drop(name):
    def mutate(block, prose):
        block["paths"] = [p for p in block["paths"] if p["id"] != name]

    return mutate


def _say(extra):
    return lambda block, prose: f"{prose} {extra}"


def _set(name, **fields):
    def mutate(block, prose):
        path(block, name).update(fields)

    return mutate


def _unit(law, name, unit):
    def mutate(block, prose):
        calc(block, law)["inputs"][name]["unit"] = unit

    return mutate


def _entity(index, **fields):
    def mutate(block, prose):
        block["entities"][index].update(fields)
        for key in [k for k, v in fields.items() if v is None]:
            del block["entities"][index][key]

    return mutate


def _price(**fields):
    def mutate(block, prose):
        price = {"item": "gpu-rtx-5060", "amount": 299, "currency": "USD", "region": "US", "date": "2025-05-19", "source": "src-price-5060"}  # fmt: skip
        block["prices"] = [{k: v for k, v in {**price, **fields}.items() if v is not None}]
        return f"{prose} The price is old: 299 USD of 2025-05-19."

    return mutate


def _add_law(law, inputs, result, unit, about=()):
    def mutate(block, prose):
        block["calculations"].append(
            {"ref": "x1", "law": law, "inputs": {n: {"value": v, "unit": u} for n, (v, u) in inputs.items()},
             "result": {"value": result, "unit": unit}, "for": list(about)}
        )  # fmt: skip

    return mutate


def _raw(text):
    return lambda block, prose: ("RAW", text)


def _no_speed_law(block, prose):
    speeds = ("L09", "L10", "L11", "L12", "L14", "L16")
    block["calculations"] = [c for c in block["calculations"] if c["law"] not in speeds]
    for entry in block["paths"]:
        entry.pop("calc", None)
        entry.pop("run", None)


L12 = {"disk_bw": (8.2, "GiB/s"), "h": (0, "1"), "routed_bytes_per_token": (4.5121536e9, "B/tok")}
L17 = {"hardware_price": (2400, "EUR"), "rent_hour": (0.6, "EUR/h"), "hours_day": (3, "h/day"), "electricity_month": (7.99, "EUR/month")}  # fmt: skip
L18 = {"watts": (350, "W"), "hours_day": (3, "h/day"), "price_kwh": (0.25, "EUR/kWh")}
L05 = {"attn_layers": (40, "1"), "n_kv_heads": (1, "1"), "head_dim": (512, "1"), "kv_bytes": (2, "B"), "tokens": (8192, "tok")}  # fmt: skip
L04 = {"moe_layers": (40, "1"), "top_k": (6, "1"), "expert_bytes": (18800640, "B")}
YES = {"verdict": "yes"}
MISTAKES = [
    ("no block", "E-FORMAT", _raw("just text")),
    ("broken json", "E-FORMAT", _raw("```check\n{\"schema\": 1,\n```")),
    ("two blocks", "E-FORMAT", _raw("```check\n{}\n```\n```check\n{}\n```")),
    ("NaN", "E-FORMAT", _raw("```check\n{\"schema\": NaN}\n```")),
    ("unknown field", "E-SCHEMA", lambda b, p: b.update(extra=1)),
    ("missing field", "E-SCHEMA", lambda b, p: b.pop("evidence") and None),
    ("wrong type", "E-SCHEMA", lambda b, p: b.update(paths={})),
    ("unknown situation key", "E-SCHEMA", lambda b, p: b["situation"].update(shoe_size={"value": 43, "status": "known"})),
    ("other knowledge base", "E-VERSION", lambda b, p: b.update(kb_version="2025.1.1")),
    ("another year's", "E-VERSION", lambda b, p: b.update(kb_version="2027.1.1")),
    ("ten times too much", "E-SLIP", _scale("L14", 10)),
    ("ten times too little", "E-SLIP", _scale("L04", 0.1)),
    ("GB for GiB", "E-SLIP", _scale("L03", 1 / 1.073741824)),
    ("MB for MiB", "E-SLIP", _scale("L03", 1.048576)),
    ("2700 KiB read as MiB", "E-SLIP", _scale("L04", 1.024)),
    ("bits for bytes", "E-SLIP", _scale("L03", 8)),
    ("twice", "E-SLIP", _scale("L14", 2)),
    ("sign", "E-SLIP", _scale("L14", -1)),
    ("rent around the clock", "E-SLIP", _add_law("L17", L17, 2400 / (438.336 - 7.99), "month")),
    ("three hours left out", "E-SLIP", _add_law("L18", L18, 7.99 / 3, "EUR/month")),
    ("a little off", "E-CALC", _scale("L14", 1.06)),
    ("far off", "E-CALC", _scale("L03", 1.37)),
    ("never is not a number", "E-CALC", _add_law("L17", {**L17, "rent_hour": (0.05, "EUR/h")}, 12.3, "month")),
    ("an input in another unit", "E-UNIT", _unit("L14", "disk_bw", "B")),
    ("an input without unit", "E-UNIT", _unit("L03", "expert_bytes", "")),
    ("a result in another unit", "E-UNIT", lambda b, p: calc(b, "L03")["result"].update(unit="tok/s")),
    ("two currencies", "E-UNIT", _add_law("L17", {**L17, "rent_hour": (0.6, "USD/h")}, 51.3, "month")),
    ("a number in prose from nowhere", "E-UNIT", _say("It reaches 7.77 tok/s.")),
    ("a German number from nowhere", "E-UNIT", _say("Das kostet 1.234,56 EUR.")),
    ("a number with spaces from nowhere", "E-UNIT", _say("Das kostet 12 345 EUR.")),
    ("a dollar from nowhere", "E-UNIT", _say("It costs $1,234.56 today.")),
    ("ten times in prose", "E-UNIT", _say("It reaches 24.3 tok/s.")),
    ("an input beside the facts", "E-INPUT", _add_law("L04", {**L04, "top_k": (8, "1")}, 6016204800, "B/tok", ["e1"])),
    ("an expert's size beside the facts", "E-INPUT", _add_law("L04", {**L04, "expert_bytes": (17694720, "B")}, 4246732800, "B/tok", ["e1"])),
    ("a fact beside the facts", "E-INPUT", _entity(0, facts={"experts": 512})),
    ("a missing path", "E-PATHS", _drop("cloud-api")),
    ("another missing path", "E-PATHS", _drop("nvme-expert-streaming")),
    ("a path twice", "E-PATHS", lambda b, p: b["paths"].append(dict(b["paths"][0]))),
    ("an unknown path", "E-PATHS", lambda b, p: b["paths"].append({**b["paths"][0], "id": "magic"})),
    ("no verdict", "E-PATHS", _set("cloud-api", verdict="perhaps")),
    ("no number", "E-PATHS", _set("cloud-api", number={})),
    ("a number without unit", "E-PATHS", _set("multi-gpu", number={"value": 4, "unit": ""})),
    ("a path's number from nowhere", "E-NUMBER", _set("nvme-expert-streaming", number={"value": 2.9, "unit": "tok/s"})),
    ("a path names no calculation", "E-NUMBER", _set("multi-gpu", calc="c999")),
    ("a ten-fold path number", "E-NUMBER", _set("nvme-expert-streaming", number={"value": 0.243, "unit": "tok/s"})),
    ("an unknown entity", "E-IDENT", _entity(0, name="DeepSeek-V9 Turbo 9B", kb_id=None, variant=None)),
    ("V4 for V4.1", "E-IDENT", _entity(0, name="DeepSeek-V4-Flash")),
    ("Ti for the plain card", "E-IDENT", lambda b, p: b["entities"].append({"ref": "e9", "kind": "gpu", "name": "RTX 5060 Ti", "kb_id": "gpu-rtx-5060"})),
    ("a document that is not there", "E-IDENT", _entity(0, kb_id="model-nothing")),
    ("a variant that is not there", "E-IDENT", _entity(0, variant="q8")),
    ("a price of another model", "E-IDENT", _price(item="model-deepseek-v4-flash", amount=0.14, source="src-price-index", date="2026-11-01")),
    ("the other law for keys and values", "E-KVKIND", _add_law("L05", L05, 671088640, "B", ["e1"])),
    ("the latent's law", "E-KVKIND", _add_law("L06", {"attn_layers": (40, "1"), "kv_lora_rank": (448, "1"), "rope_dim": (64, "1"), "kv_bytes": (2, "B"), "tokens": (8192, "tok")}, 335544320, "B", ["e1"])),
    ("a law that is not there", "E-LAW", _add_law("L99", L12, 1.95, "tok/s")),
    ("speed without a law", "E-LAW", _no_speed_law),
    ("a cloud without its law", "E-LAW", _set("cloud-api", **YES)),
    ("a price without a day", "E-SOURCE", _price(date=None)),
    ("a price without a region", "E-SOURCE", _price(region=None)),
    ("a price without a source", "E-SOURCE", _price(source=None)),
    ("a run that is not there", "E-SOURCE", lambda b, p: b["evidence"].append("run-ds-99")),
    ("a price beside its offer", "E-INPUT", _price(amount=249)),
    ("a vague model", "E-VAGUE", lambda b, p: b["entities"].append({"ref": "e9", "kind": "model", "name": "a 30B model"})),
    ("a vague card", "E-VAGUE", lambda b, p: b["entities"].append({"ref": "e9", "kind": "gpu", "name": "a modern GPU"})),
    ("no with the rules on its side", "S-DIRECTION", _set("nvme-expert-streaming", verdict="no")),
    ("no and enough", "S-DIRECTION", _set("keep-existing", verdict="no")),
    ("yes where a rule blocks", "S-VERDICT", _set("cpu-ram-offload-moe", **YES)),
    ("yes where it is too large", "S-VERDICT", _set("cpu-only-small", **YES)),
    ("an upgrade that nobody needs", "S-CONFLICT", _set("upgrade-existing", **YES)),
    ("one card and several", "S-CONFLICT", lambda b, p: _set("new-single-gpu", **YES)(b, p) or _set("multi-gpu", **YES)(b, p)),
    ("faster than the slowest part", "S-CEIL", _set("nvme-expert-streaming", number={"value": 24.3, "unit": "tok/s"})),
    ("faster than the slowest part, kept", "S-CEIL", _set("keep-existing", number={"value": 243, "unit": "tok/s"})),
    ("less than its weights", "S-SIZE", _add_law("L08", {"resident_weights": (4, "GB"), "kv": (0, "B"), "activation_peak": (0, "B"), "staging_ring": (0, "B"), "runtime_ctx": (0, "B")}, 4e9, "B", ["e1"])),
    ("less than its weights, cards", "S-SIZE", _add_law("L23", {"need_bytes": (2, "GB"), "vram_bytes": (8, "GiB"), "headroom": (0.06, "1")}, 1, "1", ["e1"])),
    ("beside what was measured", "S-EVIDENCE", _set("nvme-expert-streaming", number={"value": 1.6, "unit": "tok/s"})),
    ("beside what was measured, kept", "S-EVIDENCE", _set("keep-existing", number={"value": 3.2, "unit": "tok/s"})),
    ("Russian for English", "E-LANG", lambda b, p: PROSE["ru"]),
    ("German for English", "E-LANG", lambda b, p: PROSE["de"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "mutate"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_each_mistake_is_caught_by_its_code(name, code, mutate):
    block, prose = right()
    after = mutate(block, prose)
    if isinstance(after, tuple):
        found = check_answer(base(), after[1], last_user_message=ASKED["en"])
    else:
        found = check(block, after if isinstance(after, str) else prose)
    assert not found["ok"]
    assert code in [e["code"] for e in found["errors"]], found["errors"]
    assert all(e["message"] and e["fix"] for e in found["errors"])


def test_the_corpus_is_large_enough_and_knows_every_code():
    codes = [code for _, code, _ in MISTAKES]
    assert len(MISTAKES) >= 40
    for code in set(codes) - {"S-PRE", "E-DROP"}:
        assert codes.count(code) >= 2, code


def test_every_path_that_is_left_out_is_named():
    for known in base().paths:
        block, prose = right()
        _drop(known["id"])(block, prose)
        errors = [e for e in check(block, prose)["errors"] if e["code"] == "E-PATHS"]
        assert [e["path"] for e in errors] == [f"paths.{known['id']}"]
        assert known["id"] in errors[0]["message"]


@pytest.mark.parametrize("name", ["cpu-ram-offload-moe", "nvme-expert-streaming"])
def test_experts_of_a_dense_model_cannot_be_overridden(name):
    block, prose = right("llama-70b", "rtx5060")
    path(block, name)["verdict"] = "yes"
    block["override"] = [{"path": name, "code": "S-PRE", "reason": "I want it", "number": 1, "source": "me"}]  # fmt: skip
    errors = check(block, prose)["errors"]
    assert [e["code"] for e in errors if e["path"] == f"paths.{name}"].count("S-PRE") == 2
    assert any("cannot be overridden" in e["message"] for e in errors)


def test_a_verdict_can_be_overridden_with_a_reason_and_a_source():
    block, prose = right()
    path(block, "cpu-ram-offload-moe")["verdict"] = "yes"
    assert "S-VERDICT" in [e["code"] for e in check(block, prose)["errors"]]
    block["override"] = [{"path": "cpu-ram-offload-moe", "code": "S-VERDICT", "reason": "RAM comes tomorrow", "number": 384, "source": "src-derived"}]  # fmt: skip
    found = check(block, prose)
    assert found["ok"]
    assert "RAM comes tomorrow" in found["warnings"][0]["message"]


def test_a_forbidden_cloud_stays_forbidden():
    block, prose = right(cloud_allowed=False)
    for name in ("cloud-api", "cloud-gpu-rent"):
        path(block, name)["verdict"] = "yes"
    errors = [e for e in check(block, prose)["errors"] if e["code"] == "S-PRE"]
    assert {e["path"] for e in errors} == {"paths.cloud-api", "paths.cloud-gpu-rent"}


def test_yes_below_the_speed_wanted():
    block, _ = right(min_tok_s=5.0)
    path(block, "nvme-expert-streaming")["verdict"] = "yes"
    assert "S-DIRECTION" in [e["code"] for e in check(block, NO["en"])["errors"]]


def test_nothing_to_buy_and_no():
    block, _ = right("llama-70b", "rtx5060")
    found = check(block, NO["en"] + " There is nothing to buy.")
    assert "S-CONFLICT" in [e["code"] for e in found["errors"]]


def test_known_values_may_change_only_by_being_said():
    block, prose = right(budget=2000.0, currency="EUR")
    before = {"budget": 2000.0, "currency": "EUR"}
    assert check(block, prose, known_before=before)["ok"]
    block["situation"]["budget"]["value"] = 3000.0
    assert [e["code"] for e in check(block, prose, known_before=before)["errors"]] == ["E-DROP"]
    said = ASKED["en"] + " I have changed my mind, I can spend 3.000 € on it."
    assert check(block, prose, said, known_before=before)["ok"]
    del block["situation"]["budget"]
    assert "E-DROP" in [e["code"] for e in check(block, prose, known_before=before)["errors"]]


def test_short_texts_are_not_judged_by_language():
    block, _ = right()
    found = check(block, "Да, это можно.")
    assert found["ok"]
    assert "E-LANG" in [w["code"] for w in found["warnings"]]


def test_languages():
    for language, text in PROSE.items():
        assert lang.detect(text) == language
    assert lang.detect("Це не дуже швидко, але можна: ваша машина має все, що потрібно для цієї моделі, і вам не треба нічого купувати, якщо ви згодні з цим.") == "uk"  # fmt: skip
    assert lang.detect("この機械はそのままで使えます。新しいものを買う必要はありません。モデルはドライブから読みます。") == "ja"  # fmt: skip
    assert lang.detect("`code in English is not the text of it at all`") is None


def test_numbers_as_people_write_them():
    text = "1.234,56 EUR, 1,234.56 USD, 12 345,6 €, $2,000, 2,43 tok/s, 510 GB, 8.2 GiB/s and 0,25 EUR/kWh"
    found = [(readings[0], unit) for _, readings, unit in numbers_in(text)]
    assert found == [
        (1234.56, "EUR"), (1234.56, "USD"), (12345.6, "EUR"), (2000.0, "USD"), (2.43, "tok/s"), (510.0, "GB"),
        (8.2, "GiB/s"), (0.25, "EUR/kWh"),
    ]  # fmt: skip


@pytest.mark.parametrize("said", ["It reaches 2.43 tok/s.", "Es sind 2,43 tok/s.", "The files take 510 GB.", "Die Dateien brauchen 510,3 GB.", "It has 31 GiB of RAM and 448 GB/s.", "206 GB are missing."])  # fmt: skip
def test_numbers_of_the_facts_pass_in_any_format(said):
    block, prose = right()
    assert check(block, f"{prose} {said}")["errors"] == []


def test_the_four_published_slips_are_named():
    situation = situation_of(base(), {})
    hours = {"hours_day": (3.0, "h/day")}
    assert "power of ten" in str(slip_name(19.91, 199.1, {}, situation))
    assert "factor of 8" in str(slip_name(6.75 / 8, 6.75, {}, situation))
    assert "3 hours" in str(slip_name(0.675, 2.025, hours, situation))
    # 12.3 for 110 months: around the clock, and electricity added
    price, month = 2400.0, 2400 / 110 / (1 - 0.056)
    own = 0.056 * month
    given = {"hardware_price": (price, "EUR"), "rent_hour": (month / 3 / 30.44, "EUR/h"), "hours_day": (3.0, "h/day"), "electricity_month": (own, "EUR/month")}  # fmt: skip
    right_months = base().laws["L17"].compute(given)[0]
    assert right_months == pytest.approx(110, rel=0.01)
    assert "24 h" in str(slip_name(12.3, right_months, given, situation))
    assert "sign" in str(slip_name(12.3, right_months, given, situation))


def test_facts_of_one_s_own_need_sources_and_completeness():
    block, prose = right()
    facts = {
        "arch": "moe",
        "layers": 60,
        "ctx_max": 131072,
        "kv_kind": "mla",
        "modality": ["text"],
        "file_bytes": 3e11,
    }
    sourced = {
        k: {"value": v, "source": "https://example.org/config.json"} for k, v in facts.items()
    }
    entity = {"ref": "e9", "kind": "model", "name": "Newmodel-X2 300B", "facts": sourced}
    block["entities"].append(entity)
    assert check(block, prose)["ok"]
    entity["facts"] = facts
    assert "E-SOURCE" in [e["code"] for e in check(block, prose)["errors"]]
    entity["facts"] = {k: v for k, v in sourced.items() if k not in ("layers", "kv_kind")}
    assert "E-VAGUE" in [e["code"] for e in check(block, prose)["errors"]]
    entity["facts"] = {
        **sourced,
        **{k: {"value": "unknown", "source": "x"} for k in ("layers", "kv_kind")},
    }
    assert "E-VAGUE" in [e["code"] for e in check(block, prose)["errors"]]


def test_addresses_without_a_search_are_refused():
    block, prose = right()
    block["prices"] = [{"item": "gpu-rtx-5060", "amount": 299, "currency": "USD", "region": "US", "date": "2026-11-20", "source": "https://example.org"}]  # fmt: skip
    assert check(block, prose, searched_web=True)["ok"]
    assert "E-SOURCE" in [e["code"] for e in check(block, prose, searched_web=False)["errors"]]


def test_a_newer_minor_knowledge_base_is_a_warning():
    newer = dataclasses.replace(base(), version="2026.11.9")
    block, prose = right()
    found = check_answer(newer, answer_text(block, prose), last_user_message=ASKED["en"])
    assert found["ok"]
    assert found["warnings"][0]["code"] == "E-VERSION"


def test_the_order_is_fixed_and_all_errors_come_at_once():
    block, prose = right()
    _scale("L14", 10)(block, prose)
    _drop("cloud-api")(block, prose)
    path(block, "multi-gpu")["verdict"] = "dunno"
    one, two = check(block, prose), check(block, prose)
    assert one == two
    assert {"E-SLIP", "E-PATHS"} <= {e["code"] for e in one["errors"]}
    assert len(one["errors"]) >= 3


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.text(max_size=200))
def test_no_answer_breaks_the_validator(seed, noise):
    generator = random.Random(seed)
    block, prose = right()
    text = answer_text(block, prose + noise)
    for _ in range(generator.randrange(4)):
        at = generator.randrange(len(text))
        text = text[:at] + generator.choice(["", "}", "{", "null", "1e400", '"', "-1", noise]) + text[at + generator.randrange(12) :]  # fmt: skip
    found = check_answer(base(), text, last_user_message=noise)
    assert isinstance(found["ok"], bool)


@pytest.mark.parametrize(
    ("extra", "errors"),
    [
        (" ".join(f"{n}.57 tok/s" for n in range(20000, 31000)), 11000),  # each from nowhere
        ("111 " * 40000, 0), ("1," * 80000, 0), ("x" * 160000, 0), ("http://" * 22000, 0),
    ],
    ids=["numbers", "groups", "commas", "one word", "addresses"],
)  # fmt: skip
def test_long_answers_take_no_more_than_linear_time(extra, errors):
    """Each of these took minutes to hours where a pattern or a look-up was quadratic."""
    block, prose = right()
    found = check(block, f"{prose} {extra}")
    codes = [e["code"] for e in found["errors"]]
    assert (codes.count("E-UNIT"), codes.count("E-FORMAT")) == (errors, 0)


def test_an_answer_that_is_too_large_is_not_read():
    found = check_answer(base(), "x" * (256 * 1024 + 1))
    assert [e["code"] for e in found["errors"]] == ["E-FORMAT"]
    nested = "```check\n" + "[" * 100_000 + "\n```"
    assert not check_answer(base(), nested)["ok"]
