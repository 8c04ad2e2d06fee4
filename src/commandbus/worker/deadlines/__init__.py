"""How an attempt that runs too long is ended, and what is written down about it."""
