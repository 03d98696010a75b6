import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.tokenizer import CONTROL, TAGS, ChatTokenizer, Detokenizer
from m1serve.errors import ConfigError, RequestError

TOK = byte_tokenizer()
NANO = Path(__file__).parents[2] / "m1serve" / "model" / "nano" / "tokenizer.json"


def tokenizers() -> list[ChatTokenizer]:
    return [TOK, ChatTokenizer.load(NANO)] if NANO.is_file() else [TOK]


@pytest.mark.parametrize("tok", tokenizers())
def test_user_text_never_becomes_a_control_token(tok: ChatTokenizer) -> None:
    text = "a" + "".join(CONTROL + TAGS) + " <think>"
    assert not set(tok.encode_text(text)) & set(tok.control_ids.values())
    assert tok.decode(tok.encode_text(text)) == text


@pytest.mark.parametrize("tok", tokenizers())
def test_our_own_text_has_control_tokens_and_keeps_its_tags_when_decoded(
    tok: ChatTokenizer,
) -> None:
    text = "".join(CONTROL + TAGS)
    assert tok.encode_control(text) == [tok.control_ids[name] for name in CONTROL + TAGS]
    assert tok.decode(tok.encode_control(text)) == text


@given(text=st.text(), tags=st.lists(st.sampled_from(CONTROL + TAGS), max_size=3))
def test_any_text_survives_encoding_without_control_tokens(text: str, tags: list[str]) -> None:
    whole = text.join(["", *tags, ""])
    ids = TOK.encode_text(whole)
    assert TOK.decode(ids) == whole
    assert not set(ids) & set(TOK.control_ids.values())


@given(ids=st.lists(st.integers(0, 263)), data=st.data())
def test_detokenizing_in_pieces_gives_the_text_of_the_whole(
    ids: list[int], data: st.DataObject
) -> None:
    pieces, place, detokenizer = [], 0, Detokenizer(TOK)
    while place < len(ids):
        size = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(ids[place : place + size]))
        place += size
    assert "".join(pieces) + detokenizer.flush() == TOK.decode(ids)


def test_half_a_character_is_held_back() -> None:
    detokenizer = Detokenizer(TOK)
    ids = TOK.encode_text("é")
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.push(ids[1:]) == "é"


def test_a_lone_surrogate_is_the_clients_mistake() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        TOK.encode_text("\ud800")


def test_a_tokenizer_without_m1s_control_tokens_is_refused() -> None:
    raw = {"model": {"type": "WordPiece"}, "decoder": None}
    with pytest.raises(ConfigError, match="byte-level BPE"):
        ChatTokenizer(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"merges": [["q", "zz"]]}, "cannot be used: Token `"),
        ({"vocab": []}, "cannot be used: "),
        ({"vocab": {"\u4e2d": 0}, "merges": []}, "has the token '\u4e2d', which spells no bytes"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_name(
    change: dict[str, object], said: str
) -> None:
    raw = json.loads(byte_tokenizer().to_json())
    raw["model"] |= change
    with pytest.raises(ConfigError) as refusal:
        ChatTokenizer(json.dumps(raw), source="here.json")
    assert said in str(refusal.value)
    assert "here.json" in str(refusal.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[]", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no JSON object"):
        ChatTokenizer.load(tmp_path)


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ChatTokenizer.load(tmp_path)
