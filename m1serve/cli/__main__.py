"""`python -P -m m1serve.cli`: how `up` and `demo` start processes that must not outlive them."""

from m1serve.cli.app import main
from m1serve.cli.lifeline import die_with_parent

die_with_parent()
main()
