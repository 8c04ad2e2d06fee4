"""What people did, over all commands, limits, breakers, pauses and schedules."""
