"""stub"""


def worker() -> None:
    """stub"""
