from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tiny import random_model, tiny_config, tiny_model_dir


@pytest.fixture(scope="session")
def config() -> M1Config:
    """Four layers, two of them softmax and one of these in the middle."""
    return replace(tiny_config(128), num_hidden_layers=4, attn_type_list=(0, 1, 0, 1))


@pytest.fixture
def model(config: M1Config) -> M1ForCausalLM:
    return random_model(config)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all tests: copy it before changing it."""
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"))
