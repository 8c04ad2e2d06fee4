"""Operations that prepare a database: schema, domains, roles."""
