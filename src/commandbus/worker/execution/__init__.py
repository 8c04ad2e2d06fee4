"""How one attempt runs: its slot, its context, its connections."""
