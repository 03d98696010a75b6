"""stub"""


def sidecar() -> None:
    """stub"""
