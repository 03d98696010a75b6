"""stub"""


def retrain() -> None:
    """stub"""
