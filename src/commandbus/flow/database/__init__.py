"""What PostgreSQL itself says about our tables and sessions."""
