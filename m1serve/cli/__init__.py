"""The command line: `m1serve`. The composition root, and the only package that knows every other.

Commands import what they need when they run, so that `m1serve --help` stays light.
"""

from m1serve.cli.app import main

__all__ = ["main"]
