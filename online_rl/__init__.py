"""Scores what was served, fine-tunes with CISPO and decides whether the result may serve."""
