"""The parent process: spawns workers, watches their heartbeats, and replaces them when they die. No user code."""
