from hypothesis import given
from hypothesis import strategies as st

from m1serve.chat.stops import StopMatcher


def run(strings: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(strings), ""
    for piece in pieces:
        text, hit = matcher.push(piece)
        shown += text
        if hit is not None:
            return shown, hit
    return shown + matcher.flush(), None


def test_a_stop_string_over_several_pieces_is_not_shown() -> None:
    assert run(["own fox"], ["the br", "ow", "n f", "ox jumps"]) == ("the br", "own fox")


def test_a_prefix_that_is_no_stop_string_is_shown_after_all() -> None:
    assert run(["own fox"], ["br", "own ", "dog"]) == ("brown dog", None)


def test_a_prefix_at_the_end_of_the_stream_is_shown() -> None:
    assert run(["END"], ["xEN"]) == ("xEN", None)


def test_the_string_that_completes_first_wins() -> None:
    assert run(["cd", "abcde"], ["xabcdef"]) == ("xab", "cd")


def test_the_longest_of_those_that_end_together_wins() -> None:
    assert run(["c", "abc"], ["xabc"]) == ("x", "abc")


def test_without_stop_strings_text_passes() -> None:
    assert run([], ["a", "b"]) == ("ab", None)


alphabet = st.text(alphabet="ab", min_size=1, max_size=4)


@given(strings=st.lists(alphabet, max_size=4), text=st.text(alphabet="abc", max_size=30))
def test_every_chunking_gives_the_same(strings: list[str], text: str) -> None:
    whole = run(strings, [text])
    assert whole == run(strings, list(text))
    assert not any(string in whole[0] for string in strings)


@given(
    strings=st.lists(alphabet, min_size=1, max_size=4),
    pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
)
def test_it_shows_what_cannot_be_the_beginning_of_a_stop_string_at_once(
    strings: list[str], pieces: list[str]
) -> None:
    """Beside a plain search of the whole text so far."""
    matcher, text, shown = StopMatcher(strings), "", ""
    for piece in pieces:
        text += piece
        told, hit = matcher.push(piece)
        shown += told
        ends = [text.find(s) + len(s) for s in strings if s in text]
        if hit is not None:
            longest = max((s for s in strings if text[: min(ends)].endswith(s)), key=len)
            assert hit == longest
            assert shown == text[: min(ends) - len(longest)]
            return
        assert not ends
        beginnings = [s[:size] for s in strings for size in range(1, len(s))]
        held = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert shown == text[: len(text) - held]


def test_long_strings_that_almost_repeat_are_found() -> None:
    string = "ab" * 60 + "c"
    text = "ab" * 500 + "c" + "rest"
    for size in (1, 2, 3, 50, 121, 5000):
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        assert run([string, "zz"], pieces) == ("ab" * 440, string)
