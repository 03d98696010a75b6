"""litellm's provider `hosted_vllm`, which has an HTTP client of its own."""

from read_litellm import run_provider

run_provider("hosted_vllm")
