"""The permit store in Redis, and what happens to its permits while Redis is unreachable."""
