"""Plans: retry, cancel or complete a set of commands in the troubleshooting queue, after a preview."""
