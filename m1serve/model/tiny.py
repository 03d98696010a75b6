"""A tiny random M1 on disk, with a tokenizer: for tests and for trying things out."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from m1serve.errors import ConfigError
from m1serve.model.checkpoint import save_model
from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM

SPECIAL = (
    "<begin_of_document>",
    "<beginning_of_sentence>",
    "<end_of_sentence>",
    "<end_of_document>",
)
TAGS = ("<think>", "</think>", "<tool_calls>", "</tool_calls>")
_CORPUS = (
    "system ai_setting=assistant\nYou are a helpful assistant.",
    "system tool_setting=tools\nYou are provided with these tools:\n<tools>\n"
    '{"name": "get_order", "description": "Looks an order up.", "parameters": {"type": "object"}}\n'
    "</tools>\n\nIf you need to call tools, please respond with XML tags, and provide tool-name "
    "and json-object of arguments, following the format below:\n"
    "{name: <tool-name-1>, arguments: <args-json-object-1>}\n...\n",
    "user name=user\nWhat is the status of order 4217? Please cancel it if it is pending.",
    "ai name=assistant\nThe order 4217 is pending, so I cancel it.",
    '\n{"name": "cancel_order", "arguments": {"order_id": "4217"}}\n',
    'tool name=tools\ntool name: get_order\ntool result: {"status": "pending", "total": 35}\n\n',
)


def tiny_config(
    vocab_size: int = 512, *, bos_token_id: int | None = None, eos_token_id: int | None = None
) -> M1Config:
    """Eight layers as M1 stacks them (seven lightning, one softmax), 64 wide."""
    alpha = 2.0
    return M1Config(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=8,
        attn_type_list=(0, 0, 0, 0, 0, 0, 0, 1),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=8,
        rope_theta=10_000.0,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        layernorm_full_attention_alpha=alpha,
        layernorm_full_attention_beta=1.0,
        layernorm_linear_attention_alpha=alpha,
        layernorm_linear_attention_beta=1.0,
        layernorm_mlp_alpha=alpha,
        layernorm_mlp_beta=1.0,
        postnorm=True,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )


def random_model(config: M1Config, *, seed: int = 0) -> M1ForCausalLM:
    """A model of seeded random weights, in evaluation mode."""
    model = M1ForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.eval()


def tiny_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Byte-level BPE over a few lines of M1's chat format; tags are single, not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def tiny_model_dir(path: Path, *, seed: int = 0, tokenizer_file: Path | None = None) -> Path:
    """Writes config.json, model.safetensors and tokenizer.json; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    target = path / "tokenizer.json"
    if tokenizer_file is None:
        tiny_tokenizer().save(str(target))
    else:
        shutil.copyfile(tokenizer_file, target)
    tokenizer = Tokenizer.from_file(str(target))
    bos, eos = (tokenizer.token_to_id(name) for name in SPECIAL[1:3])
    if bos is None or eos is None:
        raise ConfigError(f"{tokenizer_file} has no {SPECIAL[1]} and {SPECIAL[2]} tokens")
    vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
    config = tiny_config(vocab_size, bos_token_id=bos, eos_token_id=eos)
    save_model(random_model(config, seed=seed), path, dtype=torch.float32)
    return path
