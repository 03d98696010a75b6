"""stub"""


def sft() -> None:
    """stub"""
