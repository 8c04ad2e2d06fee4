"""Effects outside the database, and checkpoints: written under the fence of a running attempt."""
