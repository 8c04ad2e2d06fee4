"""Key limits: the lines of commands with the same key."""
