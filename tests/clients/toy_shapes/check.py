"""The toy repository's own test: fails with its bug, passes with the right patch."""

import math

from shapes.area import circle_area, rectangle_area, triangle_area

assert rectangle_area(3, 4) == 12
assert rectangle_area(2, 2.5) == 5
assert triangle_area(3, 4) == 6
assert math.isclose(circle_area(1), math.pi)
