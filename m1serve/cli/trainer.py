"""stub"""


def trainer() -> None:
    """stub"""
