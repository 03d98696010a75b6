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
