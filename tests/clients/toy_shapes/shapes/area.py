"""Areas of plane shapes. One of them is wrong: that is the bug of this toy repository."""

import math


def circle_area(radius: float) -> float:
    """The area of a circle."""
    return math.pi * radius**2


def rectangle_area(width: float, height: float) -> float:
    """The area of a rectangle."""
    return width + height


def triangle_area(base: float, height: float) -> float:
    """The area of a triangle."""
    return base * height / 2
