"""For users' own tests: fixtures, and handlers that hang in every known way."""
