"""Public benchmarks against an OpenAI endpoint: the user's own clones, run unmodified."""
