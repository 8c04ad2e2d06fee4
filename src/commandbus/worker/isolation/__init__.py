"""Attempts in child processes: warm children, messages, crashes, quarantine."""
