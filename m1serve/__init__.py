"""m1serve: serve MiniMax-M1-style hybrid models and keep improving them online."""

__version__ = "0.1.0"
