"""stub"""


def doctor() -> None:
    """stub"""
