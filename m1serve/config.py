"""All settings in one frozen tree: defaults < TOML < M1SERVE_* environment < flags.

Unknown keys are refused. Nothing heavy is imported here. Nested fields read variables in the style
of M1SERVE_TRAIN__LR.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from m1serve.errors import ConfigError
from m1serve.exposure import require_keys


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AnswerSettings(_Section):
    """How a served name answers where a request does not say.

    None: an alias takes the model's value; the model takes MiniMax's published setting
    (`template`, temperature 1.0, top_p 0.95) when `model.path` is a MiniMax-M1, and otherwise the
    value named last.
    """

    history: Literal["exact", "template"] | None = None
    """exact: sampled ids are never rendered again. template: as published, past thinking is
    dropped. (exact)"""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """(1.0)"""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """(1.0)"""
    max_tokens: int | None = Field(default=None, ge=1)
    """(the rest of the context)"""
    max_tokens_applies_to: Literal["all", "answer"] | None = None
    """answer: max_tokens, whoever names it, leaves the think block uncounted. (all)"""
    reasoning_budget: int | None = Field(default=None, ge=0)
    """Tokens of the think block after which it is closed. (no budget)"""
    repetition_stop_tokens: int | None = Field(default=None, ge=0)
    """Sampled tokens in a row of which the model was all but certain, after which an answer stops;
    0 lets it repeat itself. (3000)"""
    repetition_stop_probability: float | None = Field(default=None, ge=0, lt=1)
    """How certain: tokens with a probability above it count. (0.99)"""
    reasoning_field: Literal["reasoning_content", "both"] | None = None
    """both: `reasoning` as well. (reasoning_content)"""


class ModelSettings(AnswerSettings):
    path: Path | None = None
    """Directory with config.json, safetensors and tokenizer.json; None means the shipped nano."""
    model_id: str = "nano"
    """Name clients use, and the first half of every weights_version."""
    aliases: dict[str, AnswerSettings] = Field(default_factory=dict)
    """Other names that `model` may carry in a request, each with answers of its own; a list of
    names means the model's."""

    @field_validator("aliases", mode="before")
    @classmethod
    def _named_only(cls, value: object) -> object:
        is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
        return {name: {} for name in value} if is_list else value  # type: ignore[attr-defined]


class EngineSettings(_Section):
    kind: Literal["local", "scripted"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of the local engine; auto is the GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of its weights and cached keys; auto is float32 on the CPU and on a GPU what is stored."""
    num_slots: int = Field(default=128, ge=1)
    """Sequences that decode together."""
    max_model_len: int = Field(default=2048, ge=16)
    prefill_chunk_tokens: int | None = Field(default=None, ge=16)
    """Prompt tokens read in one step, so that decodes are never starved; fewer where the context is
    long and a token costs more. (1,024 on a CPU, 16,384 on a GPU)"""
    memory_bytes: int | None = Field(default=None, gt=0)
    """For states, keys and values, and snapshots, beside the weights. None: what is free when the
    engine starts, as far as its slots can use it."""
    snapshot_bytes: int = Field(default=256 * 2**20, ge=0)
    """Part of it for the states of prefix snapshots. The keys and values that they share lie in the
    pages of all, and are given up when those run out."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests queued before new ones are refused with 503."""
    num_threads: int = Field(default=1, ge=1)
    """Torch threads of a serving process; spinning threads cost 10x when cores are shared."""
    max_held_versions: int = Field(default=2, ge=2)
    """Weights in memory at once, each with a cache of its own; a further version waits until the
    requests of the oldest have finished."""
    script: Path | None = None
    """Replies of the scripted engine, JSON lines."""


class KeySettings(_Section):
    """One [[serve.keys]]; `m1serve keys new` makes a key and its lines."""

    sha256: str
    """Of the key."""
    scopes: tuple[Literal["infer", "feedback", "read", "admin"], ...] = (
        "infer",
        "feedback",
        "read",
    )
    tenant: str | None = Field(default=None, pattern=r"^[0-9A-Za-z._-]{1,64}$")
    """Keys of one tenant see the same sessions; None means a tenant of its own."""


class ServeSettings(_Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    admin_port: int = Field(default=8001, ge=1, le=65535)
    api_keys: tuple[str, ...] = ()
    """sha256 hex of keys with every scope but admin. None here nor in `keys` lets anybody in
    (loopback only)."""
    keys: tuple[KeySettings, ...] = ()
    admin_key: str | None = None
    """sha256 hex of the admin key; None leaves the admin port open (loopback only)."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that browsers may let call this API, like "https://chat.example.org"; "*" is all.
    Empty is none: without keys any page a user opens could."""
    max_n: int = Field(default=64, ge=1)
    keep_alive_s: float = Field(default=10.0, gt=0)
    """Silence after which a comment, or a space before a body, is sent: clients drop a connection
    after 20 s at the earliest."""
    session_idle_s: float = Field(default=600.0, ge=0)
    """A session without a request for this long is closed."""
    retention_days: float | None = Field(default=None, gt=0)
    """Sessions are erased this long after their last turn; None keeps them."""
    journal_max_bytes: int | None = Field(default=None, ge=2**20)
    """Of one serving process, waiting for the database; what comes on top is served and not kept.
    None leaves it to the disk."""
    poll_s: float = Field(default=0.2, gt=0)
    """How often a replica looks at its target version."""
    with_ray: bool = True
    """Ray Serve; off means uvicorn in one process."""


class ScoreSettings(_Section):
    broker_url: str | None = None
    """Celery broker, redis://...; None means the embedded file transport under `home`."""
    timeout_s: float = Field(default=10.0, gt=0)
    memory_bytes: int = Field(default=2 * 2**30, gt=0)
    max_attempts: int = Field(default=3, ge=1)
    reap_s: float = Field(default=0.5, gt=0)
    """How often beat looks for jobs that are due."""
    concurrency: int = Field(default=1, ge=1)
    feedback_wait_s: float = Field(default=3600.0, gt=0)
    """A trajectory without a task waits for feedback this long after its session, and its group
    with it; then the others of the group are trained without it."""


class TrainSettings(_Section):
    algorithm: Literal["cispo"] = "cispo"
    lr: float = Field(default=5e-5, gt=0)
    weight_max: float = Field(default=5.0, gt=0)
    """Absolute cap of the CISPO weight; there is no lower bound."""
    minibatches: int = Field(default=8, ge=1)
    """Optimizer steps over one batch of groups."""
    microbatch_rows: int = Field(default=32, ge=1)
    grad_clip: float = Field(default=1.0, gt=0)
    min_groups: int = Field(default=2, ge=1)
    """Fewer eligible groups with a signal and the run is skipped."""
    max_groups: int = Field(default=64, ge=1)
    max_age_versions: int = Field(default=4, ge=0)
    every_s: float | None = Field(default=None, gt=0)
    """Period of automatic retraining; None means only on request."""
    lease_s: float = Field(default=15.0, gt=0)
    """A run whose trainer gave no sign of life for this long is taken over by the next one."""
    after_rejection: Literal["release", "burn"] = "burn"
    """What becomes of a rejected run's trajectories."""
    serving_dtype: Literal["float32", "bfloat16"] = "float32"
    parity_mean_max: float = Field(default=2e-3, gt=0)
    """Mean |trainer - sampler| logprob above which nothing is trained."""
    seed: int = 0
    num_threads: int = Field(default=2, ge=1)
    negate_advantages: bool = False
    """Fault injection for the demo: trains a candidate that the gate must refuse."""


class GateSettings(_Section):
    tasks_per_family: int = Field(default=24, ge=1)
    """At the first look; a family that seems worse is played on twice as many more."""
    max_drop: float = Field(default=0.05, ge=0)
    """Overall success may fall by at most this much, beyond its noise."""
    family_z: float = Field(default=3.0, gt=0)
    """A family fails when it is worse by more than this many standard errors, after a second look:
    with eight families one of 2 would be met by luck every few runs."""
    min_format_rate: float = Field(default=0.8, ge=0, le=1)
    """Relative to the parent's."""
    max_turn_tokens: int = Field(default=256, ge=1)
    """Of a turn on the held-out tasks: a candidate that never stops must not hold up its own gate.
    """
    max_kl: float = 0.5
    """Mean per-token KL estimate to the parent on the gate's own samples."""
    families: tuple[str, ...] = ()
    """Empty means every family the environments know."""


class Settings(BaseSettings):
    """The whole tree. Build it with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix="M1SERVE_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )
    home: Path = Path("m1serve-data")
    """Everything that is kept: database, journal, weights, broker files, logs."""
    database_url: str | None = None
    """SQLAlchemy URL; None means SQLite under `home`."""
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    serve: ServeSettings = ServeSettings()
    score: ScoreSettings = ScoreSettings()
    train: TrainSettings = TrainSettings()
    gate: GateSettings = GateSettings()

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.home.resolve() / 'm1serve.db'}"

    @property
    def journal_dir(self) -> Path:
        return self.home / "journal"

    @property
    def weights_dir(self) -> Path:
        return self.home / "weights"

    @property
    def log_dir(self) -> Path:
        return self.home / "logs"

    @property
    def model_dir(self) -> Path:
        return self.model.path or Path(__file__).parent / "model" / "nano"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = os.environ.get("M1SERVE_CONFIG")
        files = (TomlConfigSettingsSource(settings_cls, Path(toml)),) if toml else ()
        return init_settings, env_settings, *files


def load_settings(config: Path | None = None, **flags: Any) -> Settings:  # noqa: ANN401
    """Reads the tree; `config` is a TOML file, `flags` nested dicts that win over everything.

    Raises ConfigError naming every field that is unknown or out of range. A given `config` is put
    into M1SERVE_CONFIG so that child processes read the same file.
    """
    if config is not None:
        if not config.is_file():
            raise ConfigError(f"no settings file at {config}; pass --config an existing TOML file")
        os.environ["M1SERVE_CONFIG"] = str(config.resolve())
    known = {f"M1SERVE_{name.upper()}" for name in Settings.model_fields} | {"M1SERVE_CONFIG"}
    for name in os.environ:
        if name.startswith("M1SERVE_") and name.split("__")[0] not in known:
            raise ConfigError(f"unknown environment variable {name}; known are {sorted(known)}")
    try:
        settings = Settings(**flags)
    except ValidationError as error:
        lines = "; ".join(
            _unknown_setting(tuple(map(str, e["loc"])))
            if e["type"] == "extra_forbidden"
            else f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})"
            for e in error.errors()
        )
        raise ConfigError(f"settings refused: {lines}") from None
    require_keys(settings.serve)
    return settings


def _unknown_setting(place: tuple[str, ...]) -> str:
    names: list[str] = list(Settings.model_fields)
    if len(place) > 1:
        section = Settings.model_fields[place[0]].annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        names = list(section.model_fields)
    near = difflib.get_close_matches(place[-1], names, n=1)
    where = f"{place[0]} has" if len(place) > 1 else "there are"
    advice = f"did you mean {near[0]}?" if near else f"{where} {', '.join(names)}"
    return f"{'.'.join(place)} is no setting; {advice}"
