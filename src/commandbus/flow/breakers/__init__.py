"""Operations on breakers of command types and of limits."""
