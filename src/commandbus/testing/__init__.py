"""For users' own tests: handlers that hang in every known way (`commandbus.testing.hang`)."""
