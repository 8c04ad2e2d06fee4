"""The parent process: spawns workers, watches their heartbeats, replaces and buries them. No user code."""
