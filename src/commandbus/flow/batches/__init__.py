"""Operations on batches."""
