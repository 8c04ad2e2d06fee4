"""Operations on the registry of workers."""
