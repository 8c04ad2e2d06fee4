"""Operations on PGMQ queues."""
