from __future__ import annotations

from pathlib import Path

import pytest

from m1serve.errors import StoreError
from m1serve.store import Store, load_tenant_key


def test_an_unreachable_database_is_named_with_what_to_do() -> None:
    with pytest.raises(StoreError, match=r"(?s)127\.0\.0\.1:1/x failed.*check database_url"):
        Store.open("postgresql://nobody:secret@127.0.0.1:1/x")


def test_the_password_never_shows_in_an_error() -> None:
    with pytest.raises(StoreError) as caught:
        Store.open("postgresql://nobody:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["not a url", "mysql://somewhere/x"])
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match=r"(?i)use .*postgresql"):
        Store.open(url)


def test_the_tenant_key_is_made_once_and_private(tmp_path: Path) -> None:
    key = load_tenant_key(tmp_path)
    assert load_tenant_key(tmp_path) == key
    assert len(key) == 32
    assert (tmp_path / "tenant.key").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["tenant.key"]


def test_a_damaged_tenant_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tenant.key").write_bytes(b"short")
    with pytest.raises(StoreError, match="5 bytes, wanted 32"):
        load_tenant_key(tmp_path)
