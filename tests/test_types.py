"""Shared values: what may train, and that errors survive process borders."""

import pickle

import pytest

from m1serve.errors import FencedError, OverloadedError, RequestError
from m1serve.types import Sampling


@pytest.mark.parametrize(
    ("sampling", "is_trainable"),
    [
        (Sampling(), True),
        (Sampling(top_p=0.95), True),
        (Sampling(top_p=0.5), False),
        (Sampling(temperature=0.0), False),
        (Sampling(temperature=0.7), False),
        (Sampling(presence_penalty=0.1), False),
        (Sampling(repetition_penalty=1.1), False),
        (Sampling(logit_bias=((3, 1.0),)), False),
        (Sampling(top_k=40), False),
        (Sampling(seed=7, stop_token_ids=(3,)), True),
    ],
)
def test_only_undistorted_sampling_is_trainable(sampling: Sampling, is_trainable: bool) -> None:
    assert sampling.is_trainable is is_trainable


@pytest.mark.parametrize(
    "error",
    [
        RequestError("bad", param="n", code="too_many", status=422),
        OverloadedError("full", retry_after_s=3),
        FencedError("lost the lease"),
    ],
)
def test_errors_pickle_with_everything_they_carry(error: Exception) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert back.__dict__ == error.__dict__
    assert str(back) == str(error)
