"""Verifiers: what an episode was worth, computed from the ledger's own tokens."""
