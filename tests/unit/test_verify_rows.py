"""The verify stage without a model: what it needs, what it records, how it goes on, what red means."""

import copy
from pathlib import Path

import pytest

import conf
from conf.schema import NOT_FOR_FAMILY
from runtime.errors import VerificationError
from stages import verify, verify_rows
from stages.core import Runner
from stages.opening import open_engine
from stages.stage import Stage
from stages.verify_rows import Row, recorded_perplexity

GOOD = Row("a", "1", "1", True)
BAD = Row("b", "2", "below 1", False)


@pytest.fixture
def parts(monkeypatch):
    """Parts that only note that they were computed: name -> rows."""
    computed, rows = [], {"first": [GOOD], "second": [GOOD], "third": [GOOD]}

    def compute(name):
        def part(_case):
            computed.append(name)
            for row in rows[name]:
                if isinstance(row, BaseException):
                    raise row
                yield row

        return part

    monkeypatch.setattr(verify, "PARTS", {name: compute(name) for name in rows})
    monkeypatch.setattr(verify.Case, "open", classmethod(lambda cls, cfg, files: None))
    monkeypatch.setattr(verify, "engine_files", lambda inputs: None)
    return rows, computed


@pytest.fixture
def runner(make_config, tmp_path):
    """A runner of verify alone."""
    cfg = copy.deepcopy(make_config())
    cfg.model.setup = ["download"]
    stages = {"download": Stage("download", lambda _ctx: None), "verify": verify.STAGE}
    return Runner(cfg, tmp_path, stages)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("tiny", ("download", "repack", "residents")),
        ("qwen", ("download", "repack", "residents")),
        ("qwen_synthetic", ("download", "repack", "residents")),
        ("tiny_deepseek", ("download",)),
    ],
)
def test_it_needs_what_the_engine_opens(make_config, model, wanted):
    assert verify.STAGE.needs(make_config(model)) == wanted


def test_what_a_record_is_known_by(make_config):
    """Old records stay valid: these decide the key, with the keys of what is needed."""
    assert verify.STAGE.version == 1
    assert verify.params(make_config()) == {
        "documents": 40,
        "control_documents": 8,
        "device": "cpu",
        "dtype": "auto",
    }


def test_every_family_says_how_it_is_verified(make_config):
    models = [path.stem for path in (Path(conf.__file__).parent / "model").glob("*.yaml")]
    families = {make_config(model).model.family for model in models}
    families -= {name for name, stages in NOT_FOR_FAMILY.items() if "verify" in stages}
    assert families >= {"qwen", "deepseek"}
    for family in families:
        checks = verify_rows.family_checks(family)
        assert checks.controls
        assert set(checks.subtle_controls) <= set(checks.controls)
        assert bool(checks.subtle_controls) == (checks.least_divergence > 0)


def test_rows_are_recorded_and_shown(parts, runner, capsys):
    runner.run(["verify"])
    facts = runner.find("verify").facts
    assert facts["red"] == []
    assert [row["name"] for row in facts["rows"]] == ["a"] * 3
    assert capsys.readouterr().out.splitlines() == ["a  1  1  ok"] * 3
    runner.run(["verify"])
    assert parts[1] == ["first", "second", "third"], "a record is not made again"
    assert capsys.readouterr().out.splitlines() == ["a  1  1  ok"] * 3


def test_it_goes_on_where_it_was_stopped(parts, runner):
    rows, computed = parts
    rows["second"] = [GOOD, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        runner.run(["verify"])
    assert runner.find("verify") is None
    assert str(runner.decide("verify")) == "resume: 1 of 3 units are done"
    rows["second"] = [GOOD]
    runner.run(["verify"])
    assert computed == ["first", "second", "second", "third"]
    assert len(runner.find("verify").facts["rows"]) == 3


def test_red_is_recorded_said_and_stops_the_end_points(parts, runner, capsys):
    """Every part is computed all the same, and a second run says the same without computing."""
    rows, computed = parts
    rows["first"] = [BAD, GOOD]
    for _ in range(2):
        with pytest.raises(VerificationError, match=r"1 of 4 rows are red: b") as caught:
            runner.run(["verify"])
        assert caught.value.exit_code == 3
        assert "force=[verify]" in caught.value.hint
        assert "b  2  below 1  RED" in capsys.readouterr().out
    assert computed == ["first", "second", "third"]
    with pytest.raises(VerificationError, match=r"wrong numbers on this machine: b"):
        open_engine(runner.cfg, {}, runner)


@pytest.mark.parametrize(
    ("asked", "used", "figure"),
    [(40, 30, 1.6), (30, 30, 1.6), (29, 10, 1.2), (9, 9, None), (1, 1, None)],
)
def test_the_recorded_figure_of_at_most_so_many_documents(asked, used, figure):
    golden = {
        "perplexity": {
            "heldout_en.txt, first 30 documents": {"ppl": 1.6},
            "heldout_en.txt, first 10 documents": {"ppl": 1.2},
            "heldout_ru.txt, first 20 documents": {"ppl": 9.9},
        }
    }
    found = recorded_perplexity(golden, "en", asked)
    assert found == (used, None if figure is None else {"ppl": figure})
    assert recorded_perplexity({}, "en", asked) == (asked, None)
