"""Lightning attention and its companions; imports nothing of m1serve."""

# transformers probes a top-level `kernels` module; "0" makes it read ours as absent
__version__ = "0"
