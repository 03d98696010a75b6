import pytest

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def tok() -> ChatTokenizer:
    return byte_tokenizer()
