"""Operations on processes (sagas)."""
