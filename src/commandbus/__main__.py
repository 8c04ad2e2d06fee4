"""`python -m commandbus`: the `commandbus` command."""

from commandbus.cli import main

main()
