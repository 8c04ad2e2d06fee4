"""Operations on limits: declarations, permits, and where permits are kept."""
