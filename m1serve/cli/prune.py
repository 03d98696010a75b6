"""`m1serve weights prune`: frees the disk of versions that serve no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from m1serve.cli import options

Keep = Annotated[
    int | None,
    typer.Option(
        "--keep",
        min=1,
        metavar="N",
        help="Retired versions to keep, the newest (default: train.max_age_versions, whose data "
        "may still be trained).",
    ),
]


def prune(
    keep: Keep = None,
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    as_json: options.AsJson = False,
) -> None:
    """Deletes the files of retired versions but the newest, and what is left of rejected ones.

    Never of a version that is targeted, deployed, used by an unfinished run, or was imported.
    """
    from m1serve.model.weights import discard_version

    settings = options.read_settings(config=config, home=home, overrides=overrides)
    num = max(1, settings.train.max_age_versions) if keep is None else keep
    with options.open_store(settings) as store:
        versions = store.weights.prunable(settings.model.model_id, num)
    deleted = []
    num_bytes = 0
    for version in versions:
        path = Path(version.path)
        if path.exists():
            num_bytes += sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            discard_version(path)
            deleted.append(version.weights_version)
    if as_json:
        print(json.dumps({"deleted": deleted, "num_bytes": num_bytes}))
    else:
        what = ", ".join(deleted) or "nothing"
        print(f"deleted {what}; {num_bytes / 2**20:.1f} MiB are free again")
