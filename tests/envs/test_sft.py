from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from m1serve.chat.messages import ChatMessage
from m1serve.chat.reply import turn_from_ids
from m1serve.chat.template import encode_extension, encode_prompt
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.envs import FAMILIES, task_ids
from m1serve.envs.base import build_problem
from m1serve.envs.clerk import play
from m1serve.envs.saying import Shortcuts
from m1serve.errors import ConfigError
from m1serve.model.checkpoint import load_model
from m1serve.online_rl import sft
from m1serve.online_rl.demonstrations import (
    DemonstrationMix,
    desk_conversation,
    draw_desk,
    sample_texts,
    task_conversation,
)
from m1serve.online_rl.sft_recipe import Schedule, read_recipe
from m1serve.online_rl.sft_tokenizer import bare_tokenizer, save_tokenizer, train_tokenizer
from m1serve.types import StopCause

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "m1serve" / "model" / "nano"
TINY = """
[model]
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
rotary_dim = 8
intermediate_size = 32
[tokenizer]
vocab_size = 512
texts = 96
[batch]
desks = 1
desk_rows = 4
desk_parts = 1
maths_rows = 8
maths_parts = 1
[schedule]
steps = 12
lr = 1e-2
[demonstrations.shortcuts]
slip = 0.1
[demonstrations.shortcuts.hasty]
lookup = 0.5
"""


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    texts = sample_texts(bare_tokenizer(), 160, random.Random(0), DemonstrationMix())
    return ChatTokenizer(train_tokenizer(texts, 600).to_str())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(TINY)
    return file


def test_a_few_steps_lower_the_loss_and_a_second_run_goes_on_from_there(
    recipe: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    trained = sft.main(recipe, first, device="cpu")
    assert trained.steps == 12
    assert trained.loss["maths"] < 0.85 * math.log(512)
    assert load_model(first).config.vocab_size == ChatTokenizer.load(first).vocab_size == 512
    rows = [json.loads(line) for line in (first / sft.LOG_FILE).read_text().splitlines()]
    assert rows[-1]["step"] == 12
    more = sft.main(recipe, second, init=first, steps=1, device="cpu")
    assert more.loss["maths"] < 0.85 * math.log(512)
    files = [folder / "tokenizer.json" for folder in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_demonstration_has_the_tokens_of_a_served_conversation(
    family: str, tokenizer: ChatTokenizer
) -> None:
    """What the model learns to say is what serving parses, after exactly the prompts it sends."""
    (task_id,) = task_ids("train", family, 1, seed=4)
    problem, tok = build_problem(task_id), tokenizer
    shown = task_conversation(tok, problem, random.Random(1), DemonstrationMix())
    played = play(problem, random.Random(1))
    messages = [
        ChatMessage(role="system", content=problem.task.system),
        ChatMessage(role="user", content=problem.task.user),
    ]
    ids = list(encode_prompt(tok, messages, problem.task.tools).ids)
    stream = [*shown.prefix_ids, *shown.ids]
    for say, results in zip(played.said, played.results, strict=True):
        assert stream[: len(ids)] == ids
        end = stream.index(tok.eos_id, len(ids)) + 1
        turn = turn_from_ids(
            tok, turn_id="t", completion_ids=stream[len(ids) : end], stop=StopCause.EOS
        )
        assert (turn.reasoning, turn.content) == (say.thought, say.content)
        assert [c.name for c in turn.tool_calls] == [c.name for c in say.calls]
        assert turn.is_well_formed
        heard = [
            ChatMessage(role="tool", name=c.name, content=r)
            for c, r in zip(say.calls, results, strict=True)
        ]
        ids = stream[:end] + (list(encode_extension(tok, True, heard)) if heard else [])
    assert ids == stream


def test_only_what_the_clerk_says_is_marked(tokenizer: ChatTokenizer) -> None:
    rng, tok = random.Random(2), tokenizer
    mix = DemonstrationMix(two_tasks=0.5, small_talk=0.4)
    for _ in range(20):
        shown = desk_conversation(tok, draw_desk(rng), rng, mix)
        said = "".join(
            tok.decode([i]) if on else "|" for i, on in zip(shown.ids, shown.is_said, strict=True)
        )
        turns = [part for part in said.split("|") if part]
        assert turns
        assert all(t.startswith("<think>") and t.endswith("<end_of_sentence>") for t in turns)


def test_a_trained_tokenizer_keeps_digits_apart_and_tags_whole(tokenizer: ChatTokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode_control("4217<think>")] == [
        *"4217",
        "<think>",
    ]


def test_the_learning_rate_warms_up_and_ends_at_its_floor() -> None:
    schedule = Schedule(steps=100, lr=1.0, warmup=0.1, floor=0.02)
    rates = [sft.learning_rate(p, schedule) for p in (0.0, 0.05, 0.1, 0.5, 1.0)]
    assert rates[0] < 0.01
    assert 0.45 < rates[1] < 0.55
    assert rates[2] > rates[3] > rates[4]
    assert rates[4] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[schedule]\nsteps = 1\nmomentum = 3", "momentum"),
        ("[optimiser]", "optimiser"),
        ("[schedule]\nsteps = 1\n[demonstrations.weights]\nchess = 1", "chess"),
        ("[schedule", "cannot read"),
        ("", "steps"),
    ],
)
def test_a_recipe_with_an_unknown_key_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recipe(file)


def test_the_committed_recipe_describes_the_shipped_model() -> None:
    recipe = read_recipe(ROOT / "benchmarks" / "nano" / "recipe.toml")
    tok, config = ChatTokenizer.load(NANO), load_model(NANO).config
    assert recipe.model.config(tok.vocab_size, 1, tok.eos_id) == config
    assert sum(f.stat().st_size for f in NANO.iterdir()) < 16 * 2**20
    assert isinstance(recipe.demonstrations.shortcuts, Shortcuts)


def test_a_saved_tokenizer_loads_again(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    save_tokenizer(train_tokenizer(["hello 12"], 300), tmp_path)
    tok = ChatTokenizer.load(tmp_path)
    assert tok.decode(tok.encode_text("hello 12 é")) == "hello 12 é"


def test_a_start_from_nothing_or_from_its_own_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(TINY)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="is no model directory: it has no config"):
        sft.main(tmp_path / "recipe.toml", out, init=tmp_path / "missing", steps=1)
    assert not out.exists()
    with pytest.raises(ConfigError, match="give the result another directory"):
        sft.main(tmp_path / "recipe.toml", NANO / ".." / "nano", init=NANO, steps=1)
