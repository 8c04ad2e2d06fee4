"""Operations on commands: what happens to a command in the database, one verb per file."""
