"""`python -m commandbus.cli`."""

from commandbus.cli import main

main()
