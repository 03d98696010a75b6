"""litellm's provider `openai`."""

from read_litellm import run_provider

run_provider("openai")
