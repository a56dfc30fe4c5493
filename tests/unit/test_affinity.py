"""Where a conversation goes: always to the same, and only what was lost moves."""

import json

from hypothesis import given
from hypothesis import strategies as st

from runtime.server.affinity import conversation_key, preference

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)


def key(**fields):
    return conversation_key(json.dumps(fields).encode())


def test_follow_ups_share_a_key():
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    turn = [system, first]
    later = [*turn, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "More"}]
    assert key(messages=turn) == key(messages=later, stream=True, temperature=0.5)
    assert key(messages=turn) != key(messages=[first])
    assert key(messages=turn) != key(messages=[system, {"role": "user", "content": "Ho"}])
    assert key(messages=[system]) not in ("", key(messages=turn))


def test_text_completions_share_a_key_by_their_beginning():
    text = "x" * 300
    assert key(prompt=text) == key(prompt=text + "and more")
    assert key(prompt=list(range(300))) == key(prompt=list(range(400)))
    assert key(prompt="one") != key(prompt="two")


def test_what_is_no_conversation_has_no_key():
    for body in (b"", b"{", b"[]", b"null", b"{}", b'{"messages": 3}', b"\xff\xfe"):
        assert conversation_key(body) == ""


@given(names=NAMES, keys=st.lists(st.text(), min_size=1, max_size=20), data=st.data())
def test_only_the_keys_of_a_lost_name_move(names, keys, data):
    lost = data.draw(st.sampled_from(names))
    left = [name for name in names if name != lost]
    for each in keys:
        before, after = preference(each, names), preference(each, left)
        assert sorted(before) == sorted(names)
        assert [name for name in before if name != lost] == after
        assert preference(each, names[::-1]) == before


def test_keys_are_spread_evenly():
    names = ["a", "b", "c", "d"]
    firsts = [preference(str(number), names)[0] for number in range(4000)]
    # four standard deviations of a fair draw: sqrt(4000 * 3 / 16) = 27
    assert all(abs(firsts.count(name) - 1000) < 110 for name in names)
