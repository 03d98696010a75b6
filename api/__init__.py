"""The OpenAI-compatible HTTP API over an Engine and a journal; knows no torch and no ray."""

from m1serve.api.admin import create_admin_app
from m1serve.api.app import create_app

__all__ = ["create_admin_app", "create_app"]
